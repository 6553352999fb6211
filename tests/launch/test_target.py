"""How many clusters of blocks fit on a GPU: as its driver counts them, or guessed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsv4.launch import loading, occupancy
from dsv4.launch.target import Target

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("multiprocessors", "clusters"),
    [(132, (132, 66, 32, 14)), (148, (148, 74, 36, 16)), (160, (160, 80, 39, 18))],
)
def test_an_absent_gpu_is_taken_to_waste_some_multiprocessors(
    multiprocessors: int, clusters: tuple[int, ...]
) -> None:
    target = Target(DEVICE, "sm_100a", multiprocessors)
    assert tuple(map(target.resident_clusters, (1, 2, 4, 8))) == clusters


def test_what_the_driver_counted_counts() -> None:
    target = Target(DEVICE, "sm_100a", 148, ((2, 70), (8, 11)))
    assert tuple(map(target.resident_clusters, (1, 2, 4, 8))) == (148, 70, 36, 11)


def test_the_driver_is_asked_for_blocks_that_fill_a_multiprocessor() -> None:
    bindings = loading.driver()
    asked: list[Any] = []

    def count(function: object, config: Any) -> tuple[object, int]:
        asked.append(config)
        refused = config.attrs[0].value.clusterDim.x == 4
        result = bindings.CUresult
        return (result.CUDA_ERROR_INVALID_CLUSTER_SIZE if refused else result.CUDA_SUCCESS), 7

    stub = SimpleNamespace(**vars(bindings))
    stub.cuOccupancyMaxActiveClusters = count
    found = [occupancy._clusters_of(stub, 1, blocks) for blocks in occupancy.CLUSTER_SIZES]
    assert found == [7, None, 7]
    attributes = bindings.CUlaunchAttributeID
    for blocks, config in zip(occupancy.CLUSTER_SIZES, asked, strict=True):
        (attribute,) = config.attrs
        assert attribute.id == attributes.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster = attribute.value.clusterDim
        assert (cluster.x, cluster.y, cluster.z) == (blocks, 1, 1)
        assert (config.gridDimX, config.blockDimX) == (blocks, 32)
        assert config.sharedMemBytes == 227 << 10


@pytest.mark.gpu
def test_clusters_of_this_gpu() -> None:
    target = Target.of(DEVICE)
    assert [blocks for blocks, _ in target.clusters] == list(occupancy.CLUSTER_SIZES)
    for blocks, count in target.clusters:
        # No fewer than with one cluster less in each of eight GPCs.
        least = target.multiprocessors // blocks - 8
        assert least <= count <= target.multiprocessors // blocks
    assert Target.of(DEVICE) == target

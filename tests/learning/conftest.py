import os

import pytest

from .support import save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def one_rank():
    """A process group of one rank in this process, with DeepSpeed attached to it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    from pods_cluster.learning import process_group

    store = process_group.open_store("127.0.0.1", 1, 60)
    process_group.join(0, 1, "127.0.0.1", store.port, store=store, timeout=60, op_timeout=60)
    yield
    process_group.leave()

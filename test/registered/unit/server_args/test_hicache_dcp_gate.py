"""Which speculative algorithms HiCache admits under DCP: whole argument resolution."""

import argparse
import itertools
import shutil
import unittest

from sglang.test.test_utils import CustomTestCase, maybe_stub_sgl_kernel

maybe_stub_sgl_kernel()

from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.draft_configurator import TINY_LLAMA, TINY_MLA, write_config
from sglang.test.kv_pools import remembered_fields

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

ALGORITHMS = [a.name for a in SpeculativeAlgorithm if not a.is_none()]
REFUSAL = "HiCache with --dcp-size > 1 .*DSPARK"


class TestHiCacheDcpGate(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(cls.parser)
        cls.models = {
            "llama": write_config(TINY_LLAMA),
            "mla": write_config(TINY_MLA),
        }

    @classmethod
    def tearDownClass(cls):
        for folder in cls.models.values():
            shutil.rmtree(folder)

    def resolve(self, algorithm, *extra, hicache=True, dcp_size=8, model="mla"):
        """Parse and resolve, as a launch does, with one parser for all."""
        # DSPARK and DFLASH are refused for any device but CUDA.
        argv = ["--device", "cuda", "--tp-size", "8", "--dcp-size", str(dcp_size)]
        argv += ["--model-path", self.models[model], *extra]
        if hicache:
            argv.append("--enable-hierarchical-cache")
        if algorithm:
            argv += ["--speculative-algorithm", algorithm]
            argv += ["--speculative-draft-model-path", self.models["llama"]]
        with remembered_fields():
            server_args = ServerArgs.from_cli_args(self.parser.parse_args(argv))
            if hasattr(server_args, "resolve_once"):
                server_args.resolve_once()

    def outcome(self, *args, **kwargs):
        try:
            return self.resolve(*args, **kwargs)
        except (AssertionError, NotImplementedError, ValueError) as error:
            return str(error)

    def test_dspark_is_admitted(self):
        for algorithm, hicache, dcp_size in itertools.product(
            (None, "DSPARK"), (False, True), (1, 8)
        ):
            with self.subTest(algorithm, hicache=hicache, dcp=dcp_size):
                self.resolve(algorithm, hicache=hicache, dcp_size=dcp_size)

    def test_every_other_algorithm_is_refused_by_what_is_supported(self):
        for algorithm in ALGORITHMS:
            if algorithm == "DSPARK":
                continue
            with self.subTest(algorithm):
                with self.assertRaisesRegex(NotImplementedError, REFUSAL):
                    self.resolve(algorithm)
                for hicache, dcp_size in ((False, 1), (False, 8), (True, 1)):
                    said = self.outcome(algorithm, hicache=hicache, dcp_size=dcp_size)
                    self.assertNotRegex(said or "", REFUSAL)

    def test_nothing_else_is_admitted_with_dspark(self):
        for model, extra in itertools.product(
            ("mla", "llama"),
            (
                (),
                ("--hicache-storage-backend", "file"),
                ("--enable-lmcache",),
                ("--enable-hisparse",),
            ),
        ):
            with self.subTest(model, extra=extra):
                without = self.outcome(None, *extra, model=model)
                self.assertEqual(self.outcome("DSPARK", *extra, model=model), without)
                if model == "llama":
                    self.assertIsNotNone(without)


if __name__ == "__main__":
    unittest.main()

# SPDX-License-Identifier: Apache-2.0
"""evmm_torch.py without PyTorch: EVMM_TORCH_LIBRARY on the host driver, two devices of 64 MiB."""

import ctypes
import os
import pickle
import tempfile
import unittest

import evmm_torch


class ModuleTest(unittest.TestCase):
    def allocate(self, size, device=0):
        at = evmm_torch.library().evmm_torch_alloc(size, device, None)
        self.assertIsNotNone(at)
        self.addCleanup(evmm_torch.library().evmm_torch_free, at, size, device, None)
        return at

    def test_version(self):
        self.assertRegex(evmm_torch.version(), r"^\d+\.\d+\.\d+$")

    def test_memory_stats(self):
        at = self.allocate(1 << 20)
        ctypes.memset(at, 7, 1 << 20)
        stats = evmm_torch.memory_stats(0)
        self.assertGreaterEqual(stats["allocated_bytes.all.current"], 1 << 20)
        self.assertEqual(list(stats), sorted(stats))
        evmm_torch.reset_peak_memory_stats(0)
        self.assertEqual(
            evmm_torch.memory_stats(0)["allocated_bytes.all.peak"],
            stats["allocated_bytes.all.current"],
        )
        self.assertGreater(evmm_torch.max_memory_reserved(0), 0)
        self.assertGreater(evmm_torch.memory_stats(0)["allocated_bytes.all.allocated"], 0)
        evmm_torch.reset_accumulated_memory_stats(0)
        self.assertEqual(evmm_torch.memory_stats(0)["allocated_bytes.all.allocated"], 0)

    def test_empty_cache(self):
        at = evmm_torch.library().evmm_torch_alloc(1 << 24, 1, None)
        evmm_torch.library().evmm_torch_free(at, 1 << 24, 1, None)
        evmm_torch.empty_cache()
        self.assertEqual(evmm_torch.memory_stats(1)["reserved_bytes.all.current"], 0)

    def test_snapshot_is_a_pickle_like_pytorchs(self):
        evmm_torch.record_history(max_entries=1000)
        self.addCleanup(evmm_torch.record_history, "off")
        at = self.allocate(3 << 20)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "snapshot.pickle")
            evmm_torch.snapshot(path)
            with open(path, "rb") as file:
                snapshot = pickle.load(file)
        blocks = [b for s in snapshot["segments"] for b in s["blocks"]]
        self.assertIn(at, [b["address"] for b in blocks if b["state"] == "active_allocated"])
        self.assertEqual(snapshot["device_traces"][0][-2]["action"], "alloc")

    def test_errors(self):
        with self.assertRaises(evmm_torch.Error) as raised:
            evmm_torch.configure("max_split_size_mbb:40")
        self.assertEqual(raised.exception.code, -1)
        self.assertIn("max_split_size_mb", str(raised.exception))
        with self.assertRaisesRegex(evmm_torch.Error, "no device 5"):
            evmm_torch.memory_stats(5)
        with self.assertRaisesRegex(evmm_torch.Error, "/nowhere"):
            evmm_torch.snapshot("/nowhere/at/all")

    def test_out_of_memory_is_none(self):
        self.assertIsNone(evmm_torch.library().evmm_torch_alloc(1 << 40, 0, None))
        self.assertEqual(evmm_torch.library().evmm_torch_last_code(), -2)


if __name__ == "__main__":
    unittest.main()

"""Results of counters' tools, written here as their documents describe them; the tools are stand-ins."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest

from accelpatch.errors import AccelpatchError
from accelpatch.profiling import counters
from accelpatch.profiling.counters import KernelCounters

HOSTILE = '<script>alert(1)</script>\x1b[31m"; DROP TABLE kernels; --'
TRACE = (
    "Kind,Agent_Id,Queue_Id,Stream_Id,Thread_Id,Dispatch_Id,Kernel_Id,Kernel_Name,Correlation_Id,Start_Timestamp,"
    "End_Timestamp,Private_Segment_Size,Group_Segment_Size,Workgroup_Size_X,Workgroup_Size_Y,Workgroup_Size_Z,"
    "Grid_Size_X,Grid_Size_Y,Grid_Size_Z\n"
    'KERNEL_DISPATCH,4,1,0,7,1,16,"gemv<float, 4>(float*)",1,1000,3000,0,512,256,1,1,65536,1,1\n'
    'KERNEL_DISPATCH,4,1,0,7,2,16,"gemv<float, 4>(float*)",2,4000,8000,0,512,256,1,1,65536,1,1\n'
    "KERNEL_DISPATCH,4,1,0,7,3,17,norm,3,9000,9500,0,0,64,1,1,64,1,1\n"
)
COLLECTION = (
    "Correlation_Id,Dispatch_Id,Agent_Id,Queue_Id,Process_Id,Thread_Id,Grid_Size,Kernel_Id,Kernel_Name,Workgroup_Size,"
    "LDS_Block_Size,Scratch_Size,VGPR_Count,Accum_VGPR_Count,SGPR_Count,Counter_Name,Counter_Value,Start_Timestamp,"
    "End_Timestamp\n"
    "1,1,4,1,9,9,65536,16,norm,256,512,0,32,4,48,SQ_WAVES,1024.000000,1000,3000\n"
    "1,1,4,1,9,9,65536,16,norm,256,512,0,32,4,48,SQ_INSTS_VALU,10.000000,1000,3000\n"
    "2,2,4,1,9,9,65536,16,norm,256,512,0,32,4,48,SQ_WAVES,2048.000000,4000,5000\n"
)
ROCPROF = (
    "Index,KernelName,gpu-id,queue-id,queue-index,pid,tid,grd,wgr,lds,scr,arch_vgpr,accum_vgpr,sgpr,wave_size,sig,obj,"
    "SQ_WAVES,DispatchNs,BeginNs,EndNs,CompleteNs,DurationNs\n"
    '0,"norm.kd",1,0,0,9,9,65536,256,512,0,32,4,48,64,0x0,0x7f,512,100,1000,3000,3100,2000\n'
)
COMPUTE = (
    "Dispatch_ID,GPU_ID,Grid_Size,Workgroup_Size,LDS_Per_Workgroup,Scratch_Per_Workitem,Arch_VGPR,Accum_VGPR,SGPR,"
    "Kernel_Name,Start_Timestamp,End_Timestamp,SQ_WAVES\n"
    "0,1,65536,256,512,0,32,4,48,norm,1000,3000,512\n"
)
NCU_RAW = (
    "==PROF== Connected to process 9 (/usr/bin/python)\n"
    '"ID","Process ID","Process Name","Kernel Name","dram__bytes_read.sum","gpu__time_duration.sum",'
    '"launch__registers_per_thread"\n'
    '"","","","","Mbyte","usecond","register/thread"\n'
    '"0","9","python","norm","1,234.5","2.50","40"\n'
)
NCU_DETAILS = (
    '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    '"0","9","norm","GPU Speed Of Light Throughput","Duration","nsecond","2,500"\n'
    '"0","9","norm","Occupancy","Achieved Occupancy","%","41.5"\n'
)


def one(path: Path, text: str) -> KernelCounters:
    path.write_text(text)
    (found,), left = counters.read(path)
    assert left == []
    return found


def test_kernel_trace(tmp_path: Path) -> None:
    (tmp_path / "kernel_trace.csv").write_text(TRACE)
    (first, second), _ = counters.read(tmp_path)
    assert (first.kernel, first.runs, first.microseconds) == ("gemv<float, 4>(float*)", 2, 6.0)
    assert first.resources == {"shared": 512, "scratch": 0, "threads": 256}
    assert (second.kernel, second.microseconds) == ("norm", 0.5)


@pytest.mark.parametrize(
    "text, spent, values",
    [
        pytest.param(COLLECTION, 3.0, {"SQ_WAVES": 1536.0, "SQ_INSTS_VALU": 10.0}, id="counter_collection"),
        pytest.param(ROCPROF, 2.0, {"SQ_WAVES": 512.0}, id="rocprof"),
        pytest.param(COMPUTE, 2.0, {"SQ_WAVES": 512.0}, id="rocprof-compute"),
        pytest.param(NCU_DETAILS, 2.5, {"Duration": 2500.0, "Achieved Occupancy": 41.5}, id="ncu details"),
    ],
)
def test_csv(tmp_path: Path, text: str, spent: float, values: dict[str, float]) -> None:
    found = one(tmp_path / "results.csv", text)
    assert found.microseconds == spent
    assert found.counters == values
    assert found.resources.get("vector registers", 32) == 32


def test_ncu_raw(tmp_path: Path) -> None:
    found = one(tmp_path / "ncu.csv", NCU_RAW)
    assert found.microseconds == 2.5
    assert found.counters["dram__bytes_read.sum"] == 1234.5
    assert found.resources == {"vector registers": 40}


def test_lines_that_are_cut_off_are_named(tmp_path: Path) -> None:
    (tmp_path / "kernel_trace.csv").write_text(TRACE[:-20])
    found, left = counters.read(tmp_path / "kernel_trace.csv")
    assert [(kernel.kernel, kernel.runs) for kernel in found] == [("gemv<float, 4>(float*)", 2)]
    assert left == [f"{tmp_path}/kernel_trace.csv: 1 lines, which are cut off or of another form"]


def database(path: Path, rows: Iterable[tuple[str, int, int]], pmc: str = "") -> Path:
    """As rocpd's: tables with an identifier in their names, and views over them."""
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE rocpd_kernel_dispatch_0a1b (id, name, start, end, arch_vgpr_count, workgroup_x)")
    base.executemany(
        "INSERT INTO rocpd_kernel_dispatch_0a1b VALUES (?, ?, ?, ?, 64, 256)",
        [(place, *row) for place, row in enumerate(rows)],
    )
    base.execute(
        "CREATE VIEW kernels AS SELECT id, id AS dispatch_id, name, start, end, end - start AS duration, "
        "arch_vgpr_count, workgroup_x FROM rocpd_kernel_dispatch_0a1b"
    )
    if pmc:
        base.execute(pmc)
    base.commit()
    base.close()
    return path


PMC = (
    "CREATE VIEW kernel_pmc_events AS SELECT dispatch_id, name, 'SQ_WAVES' AS {counter}, 7.0 + dispatch_id AS {value} "
    "FROM kernels"
)


@pytest.mark.parametrize("counter, value", [("pmc_name", "pmc_value"), ("counter_name", "counter_value")])
def test_rocpd(tmp_path: Path, counter: str, value: str) -> None:
    path = database(
        tmp_path / "1_results.db",
        [("gemv", 1000, 3000), ("gemv", 4000, 5000), (HOSTILE, 0, 10)],
        PMC.format(counter=counter, value=value),
    )
    before = path.read_bytes()
    (first, second), left = counters.read(path)
    assert (first.kernel, first.runs, first.microseconds, first.counters) == ("gemv", 2, 3.0, {"SQ_WAVES": 7.5})
    assert first.resources == {"vector registers": 64, "threads": 256}
    assert second.kernel == HOSTILE
    assert left == []
    assert path.read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1_results.db"]


def test_what_a_terminal_would_act_on_is_not_printed(tmp_path: Path) -> None:
    found, _ = counters.read(database(tmp_path / "x.db", [(HOSTILE, 0, 10)]))
    assert "\x1b" not in counters.text(found)
    assert "<script>alert(1)</script>?[31m" in counters.text(found)


def test_databases_of_other_versions(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "empty.db").execute("CREATE TABLE rocpd_op (id)").connection.close()
    with pytest.raises(AccelpatchError, match=r"no view `kernels`.*`rocpd convert`"):
        counters.read(tmp_path / "empty.db")
    other = database(tmp_path / "other.db", [("gemv", 0, 1)], "CREATE VIEW kernel_pmc_events AS SELECT 1 AS thing")
    with pytest.raises(AccelpatchError, match="view `kernel_pmc_events` has the columns thing"):
        counters.read(other)
    whole = database(tmp_path / "whole.db", [("gemv", 0, 1)] * 4000).read_bytes()
    (tmp_path / "cut.db").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AccelpatchError, match="cut off, or of another version"):
        counters.read(tmp_path / "cut.db")


def test_a_database_that_is_still_written(tmp_path: Path) -> None:
    path = database(tmp_path / "x.db", [("gemv", 0, 1)])
    (tmp_path / "x.db-wal").write_bytes(b"pages")
    with pytest.raises(AccelpatchError, match="still being written"):
        counters.read(path)


def test_a_view_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelpatch.profiling.rocpd.SECONDS", 0.2)
    base = sqlite3.connect(tmp_path / "x.db")
    base.execute(
        "CREATE VIEW kernels AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT 'a' AS name, max(i) AS duration FROM n"
    )
    base.commit()
    base.close()
    with pytest.raises(AccelpatchError, match="interrupted"):
        counters.read(tmp_path / "x.db")


def varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def packet(time: int, event: bytes, interned: bytes = b"") -> bytes:
    more = field(12, interned) if interned else b""
    return field(1, field(8, time) + field(10, 5) + field(11, event) + more)


INTERNED = field(1, field(1, 1) + field(2, b"kernel_dispatch")) + field(2, field(1, 9) + field(2, b"gemv"))
PERFETTO = (
    packet(1000, field(9, 1) + field(11, 3) + field(22, b"hip_api") + field(23, b"hipLaunchKernel"))
    + packet(1500, field(9, 2) + field(11, 3))
    + packet(2000, field(9, 1) + field(11, 4) + field(3, 1) + field(10, 9), INTERNED)
    + packet(5000, field(9, 2) + field(11, 4))
)


def test_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "results.pftrace"
    path.write_bytes(PERFETTO)
    (found,), left = counters.read(path)
    assert (found.kernel, found.runs, found.microseconds, left) == ("gemv", 1, 3.0, [])
    path.write_bytes(PERFETTO + PERFETTO[:-9])
    _, (left_out,) = counters.read(path)
    assert "cut off or damaged after 1 kernels" in left_out
    path.write_bytes(PERFETTO[:30])
    with pytest.raises(AccelpatchError, match=r"no Perfetto trace with kernels: .*cut off"):
        counters.read(path)


@pytest.mark.parametrize("name", ["x.csv", "x.db", "x.pftrace", "x.json", "x.txt"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x00\xff what is this")
    with pytest.raises(AccelpatchError, match=str(tmp_path / name)):
        counters.read(tmp_path / name)
    with pytest.raises(AccelpatchError, match="cannot be read"):
        counters.read(tmp_path / f"none-{name}")


def test_a_trace_of_torch(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "gemv", "ts": 1.0, "dur": 2.5, "args": {"correlation": 1}}
    (tmp_path / "x.json").write_text(json.dumps({"traceEvents": [event, {**event, "ts": 5.0}]}))
    (found,), _ = counters.read(tmp_path / "x.json")
    assert (found.kernel, found.runs, found.microseconds) == ("gemv", 2, 5.0)

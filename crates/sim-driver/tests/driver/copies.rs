//! Tests of copy engines: copies and fills take time by their size, beside the kernels.

use super::*;
use crate::node::TestNode;
use partage_driver_api::exports::DriverVersion;
use partage_sim_node::state::GpuFault;
use std::ffi::c_void;
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Bytes of a copy that takes 2.66 ms over the PCIe link of an A100, generation 4 with 16 lanes.
const BYTES: usize = 64 * MIB;
const PCIE_MILLISECONDS: f64 = 2.66;

#[test]
fn copies_take_time_by_size_and_link() {
    let node = TestNode::new("A100-SXM4-40GB", 2, DriverVersion::R550);
    node.run_role("copies times");
}

#[test]
fn copies_run_beside_kernels() {
    TestNode::new("A100-SXM4-40GB", 1, DriverVersion::R550).run_role("copies beside");
}

#[test]
fn work_waits_for_the_copy_before_it() {
    TestNode::new("A100-SXM4-40GB", 1, DriverVersion::R550).run_role("copies order");
}

#[test]
fn slow_gpu_copies_slowly() {
    let node = TestNode::new("A100-SXM4-40GB", 1, DriverVersion::R550);
    node.state().inject(0, GpuFault::Slow(4000));
    node.run_role("copies slow");
}

pub fn client(arguments: &[&str]) {
    match arguments {
        ["times"] => times(),
        ["beside"] => beside(),
        ["order"] => order(),
        ["slow"] => {
            let (cuda, _) = start();
            let (card, host) = (device_memory(&cuda, BYTES), host_memory(&cuda, BYTES));
            let took = measure(&cuda, |own| ok!(cuda.cuMemcpyHtoDAsync_v2(card, host, BYTES, own)));
            assert!(took >= 4.0 * PCIE_MILLISECONDS - 0.1, "{took} ms");
        }
        other => panic!("{other:?}"),
    }
}

fn device_memory(cuda: &CudaLibrary, bytes: usize) -> CUdeviceptr {
    let mut pointer = 0;
    ok!(cuda.cuMemAlloc_v2(&mut pointer, bytes));
    pointer
}

fn host_memory(cuda: &CudaLibrary, bytes: usize) -> *mut c_void {
    let mut pointer = null_mut();
    ok!(cuda.cuMemHostAlloc(&mut pointer, bytes, 0));
    // SAFETY: memory of this size that was allocated above. The pages are there afterwards.
    unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 1, bytes) };
    pointer
}

/// Returns the milliseconds between events before and behind the work.
fn measure(cuda: &CudaLibrary, work: impl Fn(CUstream)) -> f64 {
    let (own, first, last) = (stream(cuda, 1), event(cuda), event(cuda));
    let mut least = f64::MAX;
    // The first run touches the pages; a busy machine may delay any.
    for _ in 0..5 {
        ok!(cuda.cuEventRecord(first, own));
        work(own);
        ok!(cuda.cuEventRecord(last, own));
        least = least.min(elapsed(cuda, first, last));
    }
    least
}

fn times() {
    let (cuda, context) = start();
    let (card, host) = (device_memory(&cuda, BYTES), host_memory(&cuda, BYTES));
    let near = |took: f64, expected: f64| {
        // The host moves the bytes, which may take it longer than the card.
        assert!((expected - 0.02..expected * 3.0 + 40.0).contains(&took), "{took} instead of {expected} ms");
    };
    near(measure(&cuda, |own| ok!(cuda.cuMemcpyHtoDAsync_v2(card, host, BYTES, own))), PCIE_MILLISECONDS);
    near(measure(&cuda, |own| ok!(cuda.cuMemcpyDtoHAsync_v2(host, card, BYTES, own))), PCIE_MILLISECONDS);
    // 1555 GB/s, of which 85 % are reached.
    near(measure(&cuda, |own| ok!(cuda.cuMemsetD8Async(card, 1, BYTES, own))), 0.0507);
    let other = device_memory(&cuda, BYTES);
    near(measure(&cuda, |own| ok!(cuda.cuMemcpyDtoDAsync_v2(other, card, BYTES, own))), 0.1015);
    // Synchronous copies take the same time.
    let start = Instant::now();
    ok!(cuda.cuMemcpyHtoD_v2(card, host, BYTES));
    assert!(start.elapsed().as_secs_f64() * 1000.0 >= PCIE_MILLISECONDS - 0.02);
    // Between two cards, over 12 NVLinks of 25 GB/s.
    let mut second = null_mut();
    ok!(cuda.cuCtxCreate_v2(&mut second, 0, 1));
    let there = device_memory(&cuda, BYTES);
    ok!(cuda.cuCtxSetCurrent(context));
    let peer = measure(&cuda, |own| ok!(cuda.cuMemcpyPeerAsync(there, second, card, context, BYTES, own)));
    near(peer, BYTES as f64 / 300e9 * 1e3);
    // Tiny copies take none.
    let tiny = measure(&cuda, |own| ok!(cuda.cuMemcpyHtoDAsync_v2(card, host, 4096, own)));
    assert!(tiny < 5.0, "{tiny}");
}

fn beside() {
    let (cuda, _) = start();
    let (card, host) = (device_memory(&cuda, 4 * BYTES), host_memory(&cuda, 4 * BYTES));
    let (copying, busy) = (stream(&cuda, 1), function(&cuda, "busy_1000000us"));
    // Touches the pages.
    ok!(cuda.cuMemcpyHtoD_v2(card, host, 4 * BYTES));
    let start = Instant::now();
    launch(&cuda, busy, stream(&cuda, 1));
    ok!(cuda.cuMemcpyHtoDAsync_v2(card, host, 4 * BYTES, copying));
    ok!(cuda.cuStreamSynchronize(copying));
    let copied = start.elapsed().as_secs_f64() * 1000.0;
    ok!(cuda.cuCtxSynchronize());
    let all = start.elapsed().as_secs_f64() * 1000.0;
    assert!(copied >= 4.0 * PCIE_MILLISECONDS - 0.1, "{copied} ms");
    // On a machine without a free processor, moving the bytes takes long.
    assert!(copied < 950.0 && (1000.0..1500.0).contains(&all), "{copied} ms, {all} ms");
    // Two streams share the engine of a direction.
    let (first, second) = (stream(&cuda, 1), stream(&cuda, 1));
    let start = Instant::now();
    for own in [first, second] {
        ok!(cuda.cuMemcpyHtoDAsync_v2(card, host, BYTES, own));
    }
    ok!(cuda.cuCtxSynchronize());
    assert!(start.elapsed().as_secs_f64() * 1000.0 >= 2.0 * PCIE_MILLISECONDS - 0.1);
}

fn order() {
    let (cuda, _) = start();
    let (card, host) = (device_memory(&cuda, BYTES), host_memory(&cuda, BYTES));
    let own = stream(&cuda, 1);
    let (first, last) = (event(&cuda), event(&cuda));
    ok!(cuda.cuEventRecord(first, own));
    ok!(cuda.cuMemcpyHtoDAsync_v2(card, host, BYTES, own));
    launch(&cuda, function(&cuda, "busy_1000us"), own);
    ok!(cuda.cuStreamWriteValue64_v2(own, host as u64, 7, 0));
    ok!(cuda.cuEventRecord(last, own));
    let took = elapsed(&cuda, first, last);
    assert!(took >= PCIE_MILLISECONDS + 0.98, "{took} ms");
    // SAFETY: pinned memory, which nothing writes any more.
    assert_eq!(unsafe { host.cast::<u64>().read_volatile() }, 7);
    // A stream with a running copy can be destroyed; freeing waits for it.
    ok!(cuda.cuMemcpyHtoDAsync_v2(card, host, BYTES, own));
    ok!(cuda.cuStreamDestroy_v2(own));
    ok!(cuda.cuMemFree_v2(card));
    ok!(cuda.cuCtxSynchronize());
}

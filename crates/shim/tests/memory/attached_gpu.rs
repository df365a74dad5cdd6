//! A GPU that is attached to a container while its programs run.

use super::*;
use container::shares;
use node::{print_line, wait_for_resume};
use partage_region::RegionPolicy;

const MEMORY_LIMIT: u64 = CONTEXT_BYTES + 64 * MIB;

pub fn client(arguments: &[&str]) {
    match arguments {
        ["attached"] => attached(),
        ["only"] => only(),
        other => panic!("{other:?}"),
    }
}

/// The process knows two devices from the start, and the second is granted later.
fn attached() {
    let (cuda, first, observer) = start();
    let (mut second, mut pointer, mut total) = (null_mut(), 0, 0);
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuCtxCreate_v2(&mut second, 0, 1));
    print_line("refused");
    wait_for_resume();
    ok!(cuda.cuDeviceTotalMem_v2(&mut total, 1));
    assert_eq!(total as u64, MEMORY_LIMIT);
    ok!(cuda.cuCtxCreate_v2(&mut second, 0, 1));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, (64 << 20) + 1));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    observer.assert_exact("with both cards");
    // The limit of the first GPU is unchanged.
    ok!(cuda.cuCtxSetCurrent(first));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, 1));
    observer.assert_exact("with both cards full");
    print_line("held");
    wait_for_resume();
}

/// The only device that the process knows is granted later.
fn only() {
    let cuda = CudaLibrary::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuCtxCreate_v2(&mut context, 0, 0));
    print_line("refused");
    wait_for_resume();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, (64 << 20) + 1));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    print_line("held");
    wait_for_resume();
}

#[test]
fn running_process_is_limited_on_an_attached_gpu() {
    let node = node();
    let both = shares(&node, MEMORY_LIMIT);
    let container = TestContainer::new(&node, &both[..1], RegionPolicy::default());
    let mut process = container.start("attached_gpu attached");
    process.wait_for_line("refused");
    container.owner.extend(&both[1]).unwrap();
    process.resume();
    process.wait_for_line("held");
    assert_eq!([0, 1].map(|gpu| container.used(gpu)), [MEMORY_LIMIT, MEMORY_LIMIT]);
    process.end();
}

#[test]
fn container_without_a_gpu_gets_one() {
    let node = TestNode::new("A100-SXM4-40GB", 1, DriverVersion::R550);
    let container = TestContainer::new(&node, &[], RegionPolicy::default());
    let mut process = container.start("attached_gpu only");
    process.wait_for_line("refused");
    container.owner.extend(&shares(&node, MEMORY_LIMIT)[0]).unwrap();
    process.resume();
    process.wait_for_line("held");
    assert_eq!((container.owner.base_gpus(), container.used(0)), (0, MEMORY_LIMIT));
    process.end();
}

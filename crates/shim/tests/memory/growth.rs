//! A GPU that is attached to a container while its programs run.

use super::*;
use container::shares;
use node::{say, wait_to_be_told};
use partage_region::RegionPolicy;

const LIMIT: u64 = CONTEXT + 64 * MIB;

pub fn client(arguments: &[&str]) {
    match arguments {
        ["attached"] => attached(),
        ["only"] => only(),
        other => panic!("{other:?}"),
    }
}

/// It knows two devices from the start, and the second is granted later.
fn attached() {
    let (cuda, first, observer) = start();
    let (mut second, mut pointer, mut total) = (null_mut(), 0, 0);
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuCtxCreate_v2(&mut second, 0, 1));
    say("refused");
    wait_to_be_told();
    ok!(cuda.cuDeviceTotalMem_v2(&mut total, 1));
    assert_eq!(total as u64, LIMIT);
    ok!(cuda.cuCtxCreate_v2(&mut second, 0, 1));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, (64 << 20) + 1));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    observer.exact("with both cards");
    // The first one's limit is its own.
    ok!(cuda.cuCtxSetCurrent(first));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, 1));
    observer.exact("with both cards full");
    say("held");
    wait_to_be_told();
}

/// The only device that it knows is granted later.
fn only() {
    let cuda = Cuda::started();
    let (mut context, mut pointer) = (null_mut(), 0);
    fails!(CUDA_ERROR_NOT_PERMITTED, cuda.cuCtxCreate_v2(&mut context, 0, 0));
    say("refused");
    wait_to_be_told();
    ok!(cuda.cuCtxCreate_v2(&mut context, 0, 0));
    fails!(CUDA_ERROR_OUT_OF_MEMORY, cuda.cuMemAlloc_v2(&mut pointer, (64 << 20) + 1));
    ok!(cuda.cuMemAlloc_v2(&mut pointer, 64 << 20));
    say("held");
    wait_to_be_told();
}

#[test]
fn running_process_is_held_on_an_attached_gpu() {
    let node = node();
    let both = shares(&node, LIMIT);
    let container = Container::new(&node, &both[..1], RegionPolicy::default());
    let mut player = container.start("growth attached");
    player.hear("refused");
    container.owner.extend(&both[1]).unwrap();
    player.tell();
    player.hear("held");
    assert_eq!([0, 1].map(|gpu| container.used(gpu)), [LIMIT, LIMIT]);
    player.end();
}

#[test]
fn container_without_a_gpu_gets_one() {
    let node = Node::new("A100-SXM4-40GB", 1, DriverVersion::R550);
    let container = Container::new(&node, &[], RegionPolicy::default());
    let mut player = container.start("growth only");
    player.hear("refused");
    container.owner.extend(&shares(&node, LIMIT)[0]).unwrap();
    player.tell();
    player.hear("held");
    assert_eq!((container.owner.base_gpus(), container.used(0)), (0, LIMIT));
    player.end();
}

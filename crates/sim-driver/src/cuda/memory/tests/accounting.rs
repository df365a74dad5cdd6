//! Compares the card's memory accounting with a simple model for random allocations and frees.

use super::*;
use crate::cuda::arrays;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const BLOCK_BYTES: u64 = 2 << 20;

/// An allocation to attempt.
#[derive(Clone, Debug)]
enum AllocationRequest {
    Plain(usize),
    Array([usize; 3]),
    Levels([usize; 3], u32),
    Handle(usize),
    Pinned(usize),
    Managed(usize),
}

/// An allocation that has not been freed.
enum LiveAllocation {
    Plain(CUdeviceptr, usize),
    Array(CUarray, usize),
    Levels(CUmipmappedArray, u64, usize),
    Handle(CUmemGenericAllocationHandle, usize),
    Pinned(*mut c_void),
    Managed(CUdeviceptr),
}

fn requests() -> impl Strategy<Value = AllocationRequest> {
    let sides = (1..2000usize, 0..1000usize, Just(0)).prop_map(|(x, y, z)| [x, y, z]);
    prop_oneof![
        4 => (1..4 * MIB).prop_map(AllocationRequest::Plain),
        1 => (1..2048usize).prop_map(AllocationRequest::Plain),
        1 => ((1 << 30)..(20usize << 30)).prop_map(AllocationRequest::Plain),
        2 => sides.clone().prop_map(AllocationRequest::Array),
        1 => (sides, 1..12u32).prop_map(|(sides, levels)| AllocationRequest::Levels(sides, levels)),
        2 => (1..64usize).prop_map(|blocks| AllocationRequest::Handle(blocks * 2 * MIB)),
        1 => (1..MIB).prop_map(AllocationRequest::Pinned),
        1 => (1..MIB).prop_map(AllocationRequest::Managed),
    ]
}

fn on_device() -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CU_MEM_ALLOCATION_TYPE_PINNED,
        location: CUmemLocation { type_: CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
        ..CUmemAllocationProp::default()
    }
}

fn floats(sides: [usize; 3]) -> CUDA_ARRAY3D_DESCRIPTOR {
    let [Width, Height, Depth] = sides;
    CUDA_ARRAY3D_DESCRIPTOR { Width, Height, Depth, Format: CU_AD_FORMAT_FLOAT, NumChannels: 1, Flags: 0 }
}

impl AllocationRequest {
    /// Returns the size that is charged like a plain allocation; zero for memory that is not on the card.
    fn bytes(&self) -> usize {
        let area = |sides: [usize; 3]| sides.iter().map(|&side| side.max(1)).product::<usize>() * 4;
        match *self {
            AllocationRequest::Plain(bytes) | AllocationRequest::Handle(bytes) => bytes,
            AllocationRequest::Array(sides) => area(sides),
            AllocationRequest::Levels([x, y, z], levels) => {
                let most = x.max(y).ilog2() + 1;
                (0..levels.min(most))
                    .map(|level| {
                        let half = |side: usize| if side == 0 { 0 } else { (side >> level).max(1) };
                        area([half(x), half(y), half(z)]).next_multiple_of(512)
                    })
                    .sum()
            }
            AllocationRequest::Pinned(_) | AllocationRequest::Managed(_) => 0,
        }
    }

    fn allocate(&self) -> Result<LiveAllocation, u32> {
        let checked = |code: u32, live: LiveAllocation| if code == 0 { Ok(live) } else { Err(code) };
        match *self {
            AllocationRequest::Plain(bytes) => {
                let mut pointer = 0;
                let code = call!(cuMemAlloc_v2(&mut pointer, bytes));
                checked(code, LiveAllocation::Plain(pointer, bytes))
            }
            AllocationRequest::Array(sides) => {
                let mut array = null_mut();
                let code = call!(cuArray3DCreate_v2(&mut array, &floats(sides)));
                checked(code, LiveAllocation::Array(array, self.bytes()))
            }
            AllocationRequest::Levels(sides, levels) => {
                let (mut mipmap, mut first) = (null_mut(), null_mut());
                let code = call!(cuMipmappedArrayCreate(&mut mipmap, &floats(sides), levels));
                if code != 0 {
                    return Err(code);
                }
                assert_eq!(call!(cuMipmappedArrayGetLevel(&mut first, mipmap, 0)), 0);
                Ok(LiveAllocation::Levels(mipmap, arrays::layout(first).unwrap().start, self.bytes()))
            }
            AllocationRequest::Handle(bytes) => {
                let mut handle = 0;
                let code = call!(cuMemCreate(&mut handle, bytes, &on_device(), 0));
                checked(code, LiveAllocation::Handle(handle, bytes))
            }
            AllocationRequest::Pinned(bytes) => {
                let mut pointer = null_mut();
                let code = call!(cuMemAllocHost_v2(&mut pointer, bytes));
                checked(code, LiveAllocation::Pinned(pointer))
            }
            AllocationRequest::Managed(bytes) => {
                let mut pointer = 0;
                let code = call!(cuMemAllocManaged(&mut pointer, bytes, CU_MEM_ATTACH_GLOBAL));
                checked(code, LiveAllocation::Managed(pointer))
            }
        }
    }
}

impl LiveAllocation {
    fn free(self) {
        let code = match self {
            LiveAllocation::Plain(pointer, _) | LiveAllocation::Managed(pointer) => {
                call!(cuMemFree_v2(pointer))
            }
            LiveAllocation::Array(array, _) => call!(cuArrayDestroy(array)),
            LiveAllocation::Levels(mipmap, ..) => call!(cuMipmappedArrayDestroy(mipmap)),
            LiveAllocation::Handle(handle, _) => call!(cuMemRelease(handle)),
            LiveAllocation::Pinned(pointer) => call!(cuMemFreeHost(pointer)),
        };
        assert_eq!(code, 0);
    }

    /// Returns the address and size if it is allocated from the card's blocks.
    fn piece(&self) -> Option<(u64, usize)> {
        match *self {
            LiveAllocation::Plain(pointer, bytes) => Some((pointer, bytes)),
            LiveAllocation::Array(array, bytes) => Some((arrays::layout(array).unwrap().start, bytes)),
            LiveAllocation::Levels(_, start, bytes) => Some((start, bytes)),
            _ => None,
        }
    }
}

fn expected(live: &[LiveAllocation]) -> u64 {
    let shared: BTreeSet<u64> = live
        .iter()
        .filter_map(LiveAllocation::piece)
        .filter(|&(_, bytes)| bytes <= MIB)
        .map(|(start, _)| start / BLOCK_BYTES)
        .collect();
    let whole: u64 = live
        .iter()
        .map(|live| match (live, live.piece()) {
            (_, Some((_, bytes))) if bytes > MIB => (bytes as u64).next_multiple_of(BLOCK_BYTES),
            (LiveAllocation::Handle(_, bytes), _) => *bytes as u64,
            _ => 0,
        })
        .sum();
    shared.len() as u64 * BLOCK_BYTES + whole
}

#[test]
fn card_usage_matches_allocation_model() {
    test_node::run(|| {
        open_context();
        let device = context::current().unwrap().device;
        let used = || device.state.used_memory(device.gpu) * UNIT;
        let (base, total) = (used(), device.state.memory(device.gpu) * UNIT);
        let steps = prop::collection::vec((requests(), any::<Option<prop::sample::Index>>()), 1..60);
        let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
        let outcome = TestRunner::new(config).run(&steps, |steps| {
            let mut live: Vec<LiveAllocation> = Vec::new();
            for (request, free) in steps {
                if let Some(which) = free.filter(|_| !live.is_empty()) {
                    live.swap_remove(which.index(live.len())).free();
                } else {
                    match request.allocate() {
                        Ok(made) => live.push(made),
                        Err(code) => {
                            prop_assert_eq!(code, CUDA_ERROR_OUT_OF_MEMORY, "{:?}", request);
                            let more = (request.bytes() as u64).next_multiple_of(BLOCK_BYTES);
                            prop_assert!(used() + more > total, "{:?} fits", request);
                        }
                    }
                }
                prop_assert_eq!(used() - base, expected(&live));
                prop_assert!(used() <= total);
                let mut pieces: Vec<_> = live.iter().filter_map(LiveAllocation::piece).collect();
                pieces.sort_unstable();
                prop_assert!(pieces.windows(2).all(|two| two[0].0 + two[0].1 as u64 <= two[1].0));
            }
            live.into_iter().for_each(LiveAllocation::free);
            prop_assert_eq!(used(), base);
            Ok(())
        });
        outcome.unwrap();
    });
}

#[test]
fn pools_accept_zero_bytes_and_round_their_maximum_up() {
    test_node::run(|| {
        open_context();
        let (mut stream, mut pool, mut pointer) = (null_mut(), null_mut(), 0);
        assert_eq!(call!(cuStreamCreate(&mut stream, 1)), 0);
        assert_eq!(call!(cuMemAllocAsync(&mut pointer, 0, stream)), 0);
        assert_ne!(pointer, 0);
        assert_eq!(call!(cuMemFreeAsync(pointer, stream)), 0);
        let mut props = CUmemPoolProps { allocType: CU_MEM_ALLOCATION_TYPE_PINNED, ..Default::default() };
        props.location.type_ = CU_MEM_LOCATION_TYPE_DEVICE;
        props.maxSize = 2048;
        assert_eq!(call!(cuMemPoolCreate(&mut pool, &props)), 0);
        for bytes in [0, 64, MIB] {
            assert_eq!(call!(cuMemAllocFromPoolAsync(&mut pointer, bytes, pool, stream)), 0);
        }
        assert_eq!(
            call!(cuMemAllocFromPoolAsync(&mut pointer, 2 * MIB, pool, stream)),
            CUDA_ERROR_OUT_OF_MEMORY
        );
    });
}

#[test]
fn pool_reserves_chunks_and_releases_them_at_sync() {
    test_node::run(|| {
        open_context();
        let (mut pool, mut stream, mut pointer) = (null_mut(), null_mut(), 0);
        assert_eq!(call!(cuDeviceGetDefaultMemPool(&mut pool, 0)), 0);
        assert_eq!(call!(cuStreamCreate(&mut stream, 1)), 0);
        let get = |attribute| {
            let mut value = 0u64;
            assert_eq!(call!(cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast())), 0);
            value as usize
        };
        let start = free_bytes();
        assert_eq!(call!(cuMemAllocAsync(&mut pointer, MIB, stream)), 0);
        assert_eq!(start - free_bytes(), 32 * MIB);
        assert_eq!(get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 32 * MIB);
        assert_eq!(get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), MIB);
        assert_eq!(call!(cuMemsetD8Async(pointer, 1, MIB, stream)), 0);
        assert_eq!(call!(cuMemsetD8Async(pointer, 1, MIB + 1, stream)), INVALID_VALUE);
        assert_eq!(call!(cuMemFreeAsync(pointer, stream)), 0);
        assert_eq!(call!(cuMemFreeAsync(pointer, stream)), INVALID_VALUE);
        assert_eq!(get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
        assert_eq!(start - free_bytes(), 32 * MIB);
        assert_eq!(call!(cuStreamSynchronize(stream)), 0);
        assert_eq!(free_bytes(), start);
        // Memory below the release threshold stays reserved.
        let mut threshold = u64::MAX;
        let value = (&raw mut threshold).cast();
        assert_eq!(call!(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, value)), 0);
        assert_eq!(call!(cuMemAllocAsync(&mut pointer, 100 * MIB, stream)), 0);
        assert_eq!(call!(cuMemFree_v2(pointer)), 0);
        assert_eq!(call!(cuCtxSynchronize()), 0);
        assert_eq!(start - free_bytes(), 128 * MIB);
        assert_eq!(get(CU_MEMPOOL_ATTR_USED_MEM_HIGH), 100 * MIB);
        assert_eq!(call!(cuMemPoolTrimTo(pool, 0)), 0);
        assert_eq!(free_bytes(), start);
        // A nearly full card is used to the last block.
        let most = allocate(start - 6 * MIB);
        assert_eq!(call!(cuMemAllocAsync(&mut pointer, 3 * MIB, stream)), 0);
        let mut none = 0;
        assert_eq!(call!(cuMemAllocAsync(&mut none, 3 * MIB, stream)), CUDA_ERROR_OUT_OF_MEMORY);
        assert_eq!(call!(cuMemFree_v2(most)), 0);
        assert_eq!(call!(cuMemPoolDestroy(pool)), INVALID_VALUE);
    });
}

#[test]
fn stream_reuses_its_freed_memory_immediately() {
    test_node::run(|| {
        open_context();
        let (mut module, mut function) = (null_mut(), null_mut());
        assert_eq!(call!(cuModuleLoadData(&mut module, c"image".as_ptr().cast())), 0);
        assert_eq!(call!(cuModuleGetFunction(&mut function, module, c"busy_1000us".as_ptr())), 0);
        let mut streams = [null_mut(); 2];
        for stream in &mut streams {
            assert_eq!(call!(cuStreamCreate(stream, 1)), 0);
        }
        let [first, second] = streams;
        // Together far more than the card has, but one after the other.
        for _ in 0..20 {
            let mut pointer = 0;
            assert_eq!(call!(cuMemAllocAsync(&mut pointer, 30 << 30, first)), 0);
            let launched =
                call!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, first, null_mut(), null_mut()));
            assert_eq!(launched, 0);
            assert_eq!(call!(cuMemFreeAsync(pointer, first)), 0);
        }
        // Another stream has to wait for the memory, and then gets it.
        let mut pointer = 0;
        assert_eq!(call!(cuMemAllocAsync(&mut pointer, 30 << 30, second)), 0);
        assert_eq!(call!(cuMemFreeAsync(pointer, second)), 0);
    });
}

/// Exported and imported handles refer to the same memory, charged until its last handle and mapping are gone.
#[test]
fn imported_handles_keep_memory_charged() {
    test_node::run(|| {
        open_context();
        let start = free_bytes();
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let shared = CUmemAllocationProp { requestedHandleTypes: kind, ..on_device() };
        let (mut first, mut second, mut third, mut base, mut sent) = (0, 0, 0, 0, -1i32);
        assert_eq!(call!(cuMemAddressReserve(&mut base, 4 * MIB, 0, 0, 0)), 0);
        for _ in 0..2 {
            assert_eq!(call!(cuMemCreate(&mut first, 4 * MIB, &shared, 0)), 0);
            assert_eq!(call!(cuMemExportToShareableHandle((&raw mut sent).cast(), first, kind, 0)), 0);
            let by = sent as usize as *mut c_void;
            assert_eq!(call!(cuMemImportFromShareableHandle(&mut second, by, kind)), 0);
            assert_eq!(call!(cuMemRelease(first)), 0);
            // Also possible after the first handle was released.
            assert_eq!(call!(cuMemImportFromShareableHandle(&mut third, by, kind)), 0);
            assert_eq!(call!(cuMemMap(base, 4 * MIB, 0, third, 0)), 0);
            assert_eq!(call!(cuMemRelease(second)), 0);
            assert_eq!(call!(cuMemRelease(third)), 0);
            assert_eq!(start - free_bytes(), 4 * MIB);
            assert_eq!(call!(cuMemUnmap(base, 4 * MIB)), 0);
            assert_eq!(free_bytes(), start);
            // SAFETY: the driver created the descriptor for the test.
            assert_eq!(unsafe { libc::close(sent) }, 0);
        }
    });
}

#[test]
fn physical_handles_are_mapped_and_unmapped() {
    test_node::run(|| {
        open_context();
        let start = free_bytes();
        let (mut handle, mut base) = (0, 0);
        assert_eq!(call!(cuMemCreate(&mut handle, MIB, &on_device(), 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemCreate(&mut handle, 4 * MIB, &on_device(), 0)), 0);
        assert_eq!(start - free_bytes(), 4 * MIB);
        assert_eq!(call!(cuMemAddressReserve(&mut base, 3 * MIB, 0, 0, 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemAddressReserve(&mut base, 16 * MIB, 0, 0, 0)), 0);
        assert_eq!(call!(cuMemMap(base + 4096, 4 * MIB, 0, handle, 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemMap(base, 8 * MIB, 0, handle, 0)), INVALID_VALUE);
        assert_eq!(call!(cuMemMap(base, 4 * MIB, 0, handle, 0)), 0);
        assert_eq!(call!(cuMemMap(base + 2 * MIB as u64, 4 * MIB, 0, handle, 0)), INVALID_VALUE);
        let mut second = 0;
        assert_eq!(call!(cuMemCreate(&mut second, 4 * MIB, &on_device(), 0)), 0);
        assert_eq!(call!(cuMemMap(base + 4 * MIB as u64, 4 * MIB, 0, second, 0)), 0);
        // The mapping is not accessible before `cuMemSetAccess`.
        assert_eq!(call!(cuMemsetD8_v2(base, 7, MIB)), INVALID_VALUE);
        let access =
            CUmemAccessDesc { location: on_device().location, flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        assert_eq!(call!(cuMemSetAccess(base, 8 * MIB, &access, 1)), 0);
        assert_eq!(call!(cuMemSetAccess(base, 12 * MIB, &access, 1)), INVALID_VALUE);
        assert_eq!(call!(cuMemsetD8_v2(base, 7, 8 * MIB)), 0);
        assert_eq!(call!(cuMemsetD8_v2(base, 7, 8 * MIB + 1)), INVALID_VALUE);
        let mut flags = 0;
        assert_eq!(call!(cuMemGetAccess(&mut flags, &access.location, base)), 0);
        assert_eq!(flags, 3);
        // The memory stays allocated while it is mapped.
        assert_eq!(call!(cuMemRelease(handle)), 0);
        assert_eq!(call!(cuMemRelease(second)), 0);
        assert_eq!(start - free_bytes(), 8 * MIB);
        let mut again = 0;
        assert_eq!(call!(cuMemRetainAllocationHandle(&mut again, base as *mut c_void)), 0);
        assert_eq!(again, handle);
        assert_eq!(call!(cuMemRelease(again)), 0);
        assert_eq!(call!(cuMemUnmap(base, 2 * MIB)), INVALID_VALUE);
        assert_eq!(call!(cuMemAddressFree(base, 16 * MIB)), INVALID_VALUE);
        assert_eq!(call!(cuMemUnmap(base, 8 * MIB)), 0);
        assert_eq!(call!(cuMemUnmap(base, 8 * MIB)), INVALID_VALUE);
        assert_eq!(free_bytes(), start);
        assert_eq!(call!(cuMemRelease(handle)), INVALID_VALUE);
        assert_eq!(call!(cuMemAddressFree(base, 8 * MIB)), INVALID_VALUE);
        assert_eq!(call!(cuMemAddressFree(base, 16 * MIB)), 0);
        assert_eq!(call!(cuMemAddressFree(base, 16 * MIB)), INVALID_VALUE);
    });
}

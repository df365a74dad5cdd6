//! Compares copies and fills with byte-by-byte loops.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The kind of memory on one side of a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum TestPlace {
    Host,
    Pinned,
    Device,
    Unified,
    Array,
}

fn place() -> impl Strategy<Value = TestPlace> {
    prop_oneof![
        Just(TestPlace::Host),
        Just(TestPlace::Pinned),
        Just(TestPlace::Device),
        Just(TestPlace::Unified),
        Just(TestPlace::Array)
    ]
}

/// One side of a copy: a region with padding between its rows.
#[derive(Clone, Debug)]
struct CopyRegion {
    place: TestPlace,
    sides: [usize; 3],
    offset: [usize; 3],
    padding: usize,
}

impl CopyRegion {
    fn pitch(&self) -> usize {
        self.sides[0] + self.padding
    }

    fn bytes(&self) -> usize {
        self.pitch() * self.sides[1] * self.sides[2]
    }

    fn index(&self, x: usize, y: usize, z: usize) -> usize {
        let [ox, oy, oz] = self.offset;
        ((oz + z) * self.sides[1] + oy + y) * self.pitch() + ox + x
    }
}

fn side(extent: [usize; 3]) -> impl Strategy<Value = CopyRegion> {
    let around = prop::array::uniform3((0..4usize, 0..4usize));
    (place(), around, 0..9usize).prop_map(move |(place, around, padding)| CopyRegion {
        place,
        sides: [0, 1, 2].map(|axis: usize| extent[axis] + around[axis].0 + around[axis].1),
        offset: [0, 1, 2].map(|axis: usize| around[axis].0),
        // Rows of arrays have no padding.
        padding: if place == TestPlace::Array { 0 } else { padding },
    })
}

/// Memory for one side of a copy, filled with `bytes`.
struct RegionMemory {
    side: CopyRegion,
    host: Vec<u8>,
    pinned: *mut c_void,
    device: CUdeviceptr,
    array: CUarray,
}

impl RegionMemory {
    fn new(side: &CopyRegion, bytes: &[u8]) -> Self {
        let mut made = Self {
            side: side.clone(),
            host: bytes.to_vec(),
            pinned: null_mut(),
            device: 0,
            array: null_mut(),
        };
        let from = bytes.as_ptr().cast::<c_void>();
        match side.place {
            TestPlace::Host => {}
            TestPlace::Pinned => {
                assert_eq!(call!(cuMemAllocHost_v2(&mut made.pinned, bytes.len())), 0);
                assert_eq!(call!(cuMemcpy(made.pinned as u64, from as u64, bytes.len())), 0);
            }
            TestPlace::Device | TestPlace::Unified => {
                made.device = allocate(bytes.len());
                assert_eq!(call!(cuMemcpyHtoD_v2(made.device, from, bytes.len())), 0);
            }
            TestPlace::Array => {
                let [width, height, depth] = side.sides;
                let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
                    Width: width,
                    Height: height,
                    Depth: depth,
                    Format: CU_AD_FORMAT_UNSIGNED_INT8,
                    NumChannels: 1,
                    Flags: 0,
                };
                assert_eq!(call!(cuArray3DCreate_v2(&mut made.array, &descriptor)), 0);
                made.whole(from.cast_mut(), true);
            }
        }
        made
    }

    /// Copies the whole array from or to host memory.
    fn whole(&self, host: *mut c_void, to_array: bool) {
        let [width, height, depth] = self.side.sides;
        let mut copy =
            CUDA_MEMCPY3D { WidthInBytes: width, Height: height, Depth: depth, ..CUDA_MEMCPY3D::default() };
        (copy.srcArray, copy.dstArray, copy.srcHost, copy.dstHost) = (self.array, self.array, host, host);
        (copy.srcPitch, copy.dstPitch, copy.srcHeight, copy.dstHeight) = (width, width, height, height);
        (copy.srcMemoryType, copy.dstMemoryType) = if to_array {
            (CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_ARRAY)
        } else {
            (CU_MEMORYTYPE_ARRAY, CU_MEMORYTYPE_HOST)
        };
        assert_eq!(call!(cuMemcpy3D_v2(&copy)), 0);
    }

    fn kind(&self) -> CUmemorytype {
        match self.side.place {
            TestPlace::Host | TestPlace::Pinned => CU_MEMORYTYPE_HOST,
            TestPlace::Device => CU_MEMORYTYPE_DEVICE,
            TestPlace::Unified => CU_MEMORYTYPE_UNIFIED,
            TestPlace::Array => CU_MEMORYTYPE_ARRAY,
        }
    }

    fn host(&self) -> *mut c_void {
        if self.pinned.is_null() { self.host.as_ptr().cast_mut().cast() } else { self.pinned }
    }

    /// Returns the contents and frees the memory.
    fn end(self) -> Vec<u8> {
        let mut bytes = self.host.clone();
        let to = bytes.as_mut_ptr().cast::<c_void>();
        match self.side.place {
            TestPlace::Host => {}
            TestPlace::Pinned => {
                assert_eq!(call!(cuMemcpy(to as u64, self.pinned as u64, bytes.len())), 0);
                assert_eq!(call!(cuMemFreeHost(self.pinned)), 0);
            }
            TestPlace::Device | TestPlace::Unified => {
                assert_eq!(call!(cuMemcpyDtoH_v2(to, self.device, bytes.len())), 0);
                assert_eq!(call!(cuMemFree_v2(self.device)), 0);
            }
            TestPlace::Array => {
                self.whole(to, false);
                assert_eq!(call!(cuArrayDestroy(self.array)), 0);
            }
        }
        bytes
    }
}

fn numbers(seed: u8, count: usize) -> Vec<u8> {
    (0..count).map(|index| (index as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

#[test]
fn memcpy3d_copies_exactly_the_box() {
    test_node::run(|| {
        open_context();
        let mut stream = null_mut();
        assert_eq!(call!(cuStreamCreate(&mut stream, 1)), 0);
        let cases = prop::array::uniform3(0..7usize)
            .prop_flat_map(|extent| (Just(extent), side(extent), side(extent), any::<bool>()));
        let config = Config { cases: 300, failure_persistence: None, ..Config::default() };
        let outcome = TestRunner::new(config).run(&cases, |(extent, to, from, in_stream)| {
            // An allocation cannot be empty.
            prop_assume!(to.bytes() > 0 && from.bytes() > 0);
            let (source, mut expected) = (numbers(3, from.bytes()), numbers(101, to.bytes()));
            let (out, into) = (RegionMemory::new(&from, &source), RegionMemory::new(&to, &expected));
            for z in 0..extent[2] {
                for y in 0..extent[1] {
                    for x in 0..extent[0] {
                        expected[to.index(x, y, z)] = source[from.index(x, y, z)];
                    }
                }
            }
            let copy = CUDA_MEMCPY3D {
                srcXInBytes: from.offset[0],
                srcY: from.offset[1],
                srcZ: from.offset[2],
                srcMemoryType: out.kind(),
                srcHost: out.host(),
                srcDevice: out.device,
                srcArray: out.array,
                srcPitch: from.pitch(),
                srcHeight: from.sides[1],
                dstXInBytes: to.offset[0],
                dstY: to.offset[1],
                dstZ: to.offset[2],
                dstMemoryType: into.kind(),
                dstHost: into.host(),
                dstDevice: into.device,
                dstArray: into.array,
                dstPitch: to.pitch(),
                dstHeight: to.sides[1],
                WidthInBytes: extent[0],
                Height: extent[1],
                Depth: extent[2],
                ..CUDA_MEMCPY3D::default()
            };
            if in_stream {
                prop_assert_eq!(call!(cuMemcpy3DAsync_v2(&copy, stream)), 0);
                prop_assert_eq!(call!(cuStreamSynchronize(stream)), 0);
            } else {
                prop_assert_eq!(call!(cuMemcpy3D_v2(&copy)), 0);
            }
            // The copy converted to node parameters and back has the same effect.
            if extent.iter().all(|&side| side > 0) {
                let op = MemoryOp::copy_3d(&copy).unwrap();
                let MemoryNodeParams::Copy(params) = op.params() else {
                    panic!("a copy must convert to copy parameters")
                };
                MemoryOp::copy_3d(&params).unwrap().run();
            }
            prop_assert_eq!(into.end(), expected);
            prop_assert_eq!(out.end(), source);
            Ok(())
        });
        outcome.unwrap();
    });
}

#[test]
fn memset_fills_exactly_the_rows() {
    test_node::run(|| {
        open_context();
        let (width, height, pitch) = (20usize, 5usize, 32usize);
        let pointer = allocate(pitch * height);
        let read = || {
            let mut bytes = vec![0u8; pitch * height];
            assert_eq!(call!(cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), pointer, bytes.len())), 0);
            bytes
        };
        assert!(read().iter().all(|&byte| byte == 0));
        assert_eq!(call!(cuMemsetD8_v2(pointer, 0xee, pitch * height)), 0);
        assert_eq!(call!(cuMemsetD2D32_v2(pointer, pitch, 0x0403_0201, width / 4, height)), 0);
        for (index, byte) in read().into_iter().enumerate() {
            let inside = index % pitch < width;
            assert_eq!(byte, if inside { (index % pitch % 4) as u8 + 1 } else { 0xee }, "{index}");
        }
        assert_eq!(call!(cuMemsetD16_v2(pointer + 2, 0x0a0b, 3)), 0);
        assert_eq!(read()[..10], [1, 2, 0x0b, 0x0a, 0x0b, 0x0a, 0x0b, 0x0a, 1, 2]);
        assert_eq!(call!(cuMemsetD2D8_v2(pointer, 10, 1, 20, 2)), INVALID_VALUE);
        assert_eq!(call!(cuMemsetD2D8_v2(pointer, pitch, 1, width, height + 1)), INVALID_VALUE);
        assert_eq!(call!(cuMemsetD2D8_v2(pointer, pitch, 1, 0, height + 1)), 0);
    });
}

/// Whether streams that wait in `wait_for_gate` may continue.
static GATE_OPEN: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn wait_for_gate(_: *mut c_void) {
    while !GATE_OPEN.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn async_copies_keep_stream_order() {
    test_node::run(|| {
        open_context();
        let (mut module, mut function, mut stream) = (null_mut(), null_mut(), null_mut());
        assert_eq!(call!(cuModuleLoadData(&mut module, c"image".as_ptr().cast())), 0);
        assert_eq!(call!(cuModuleGetFunction(&mut function, module, c"busy_20000us".as_ptr())), 0);
        assert_eq!(call!(cuStreamCreate(&mut stream, 1)), 0);
        let pointer = allocate(8);
        let mut pinned = null_mut();
        assert_eq!(call!(cuMemAllocHost_v2(&mut pinned, 8)), 0);
        let word = pinned.cast::<u64>();
        // Nothing starts before the gate is open, however slow this thread is.
        let launch = || {
            GATE_OPEN.store(false, Ordering::Release);
            assert_eq!(call!(cuLaunchHostFunc(stream, Some(wait_for_gate), null_mut())), 0);
            call!(cuLaunchKernel(function, 1000, 1, 1, 1024, 1, 1, 0, stream, null_mut(), null_mut()))
        };
        // Pageable memory is read before the call returns.
        let mut pageable = 7u64;
        assert_eq!(launch(), 0);
        assert_eq!(call!(cuMemcpyHtoDAsync_v2(pointer, (&raw const pageable).cast(), 8, stream)), 0);
        pageable = 8;
        assert_eq!(call!(cuStreamQuery(stream)), CUDA_ERROR_NOT_READY);
        assert_eq!(call!(cuMemcpyDtoHAsync_v2(pinned, pointer, 8, stream)), 0);
        // SAFETY: pinned memory of the test.
        assert_eq!(unsafe { word.read_volatile() }, 0);
        GATE_OPEN.store(true, Ordering::Release);
        assert_eq!(call!(cuStreamSynchronize(stream)), 0);
        // SAFETY: pinned memory of the test.
        assert_eq!((unsafe { word.read_volatile() }, pageable), (7, 8));
        // Pinned memory is read when the stream reaches the copy, and freeing it waits for that.
        assert_eq!(launch(), 0);
        assert_eq!(call!(cuMemcpyHtoDAsync_v2(pointer, pinned, 8, stream)), 0);
        // SAFETY: pinned memory of the test.
        unsafe { word.write_volatile(9) };
        GATE_OPEN.store(true, Ordering::Release);
        assert_eq!(call!(cuMemFreeHost(pinned)), 0);
        assert_eq!(call!(cuMemcpyDtoHAsync_v2((&raw mut pageable).cast(), pointer, 8, stream)), 0);
        assert_eq!(pageable, 9);
    });
}

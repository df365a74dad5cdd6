//! Modules and libraries: images of device code and their functions.
//!
//! No device code runs. Any image is accepted and has every function requested of it (PTX only those it declares):
//! only the function's name matters, because it may determine how long a launch takes.

mod image;
mod kernel_functions;
mod module_functions;

use super::context::Context;
use super::handle::{HandleArena, handle_of};
use super::session::session;
use super::*;
use crate::state::UNIT;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// An image loaded into a context; as a library, possibly into none yet.
pub(super) struct Module {
    alive: AtomicBool,
    /// The context; a library is loaded into one on first use.
    context: Mutex<Option<&'static Context>>,
    /// The id of the context, or zero.
    owner: AtomicU64,
    image: image::ModuleImage,
    /// Size charged to the card, in bytes.
    bytes: u64,
    /// Whether it was loaded as a library.
    library: bool,
    functions: Mutex<BTreeMap<CString, &'static Function>>,
    globals: Mutex<BTreeMap<CString, (CUdeviceptr, usize)>>,
    /// Bytes charged for functions that were launched.
    loaded_functions: Mutex<u64>,
}

/// A function of a module or a kernel of a library.
pub(super) struct Function {
    pub(super) name: CString,
    pub(super) module: &'static Module,
    /// Duration of a launch, in nanoseconds.
    pub(super) duration: u64,
    /// Set if the kernel waits for peers; `duration` is zero then.
    pub(super) peers: Option<PeerGroup>,
    /// Memory in bytes that it takes when it is first launched.
    load_bytes: u64,
    /// The id of the context in which it can be launched without further checks, or zero.
    ready_in: AtomicU64,
    alive: AtomicBool,
    dynamic_shared: AtomicI32,
    carveout: AtomicI32,
    cluster: [AtomicI32; 3],
    /// Block shape for the deprecated launch functions, set before the launch.
    pub(super) block: [AtomicU32; 3],
}

static MODULES: HandleArena<Module> = HandleArena::new();
static FUNCTIONS: HandleArena<Function> = HandleArena::new();

/// Resolves a function handle.
#[inline]
pub(super) fn function(handle: CUfunction) -> Result<&'static Function, CudaError> {
    match FUNCTIONS.get(handle) {
        Some(function) if function.alive.load(Ordering::Acquire) => Ok(function),
        _ => Err(CudaError::INVALID_HANDLE),
    }
}

fn module(handle: CUmodule) -> Result<&'static Module, CudaError> {
    session()?;
    live(MODULES.get(handle))
}

fn library(handle: CUlibrary) -> Result<&'static Module, CudaError> {
    session()?;
    live(MODULES.get(handle))
        .and_then(|module| if module.library { Ok(module) } else { Err(CudaError::INVALID_HANDLE) })
}

fn live(module: Option<&'static Module>) -> Result<&'static Module, CudaError> {
    module.filter(|module| module.alive.load(Ordering::Acquire)).ok_or(CudaError::INVALID_HANDLE)
}

/// Unloads all modules of a context.
pub(super) fn drop_all(context: &'static Context) {
    for module in MODULES.live() {
        let own = *locked(&module.context);
        if own.is_some_and(|own| std::ptr::eq(own, context)) {
            if module.library {
                // The library remains and is loaded again on its next use.
                module.unload_from_context();
            } else {
                module.unload();
            }
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Module {
    fn load(
        image: image::ModuleImage,
        context: Option<&'static Context>,
        library: bool,
    ) -> Result<&'static Self, CudaError> {
        let bytes = (image.bytes() as u64).max(1).next_multiple_of(UNIT);
        let made = MODULES.make(
            || Self {
                alive: AtomicBool::new(true),
                context: Mutex::new(None),
                owner: AtomicU64::new(0),
                image,
                bytes,
                library,
                functions: Mutex::default(),
                globals: Mutex::default(),
                loaded_functions: Mutex::default(),
            },
            |_| (),
        );
        let module = made.ok_or(CudaError::OUT_OF_MEMORY)?;
        if let Some(context) = context
            && let Err(error) = module.load_into(context)
        {
            module.alive.store(false, Ordering::Release);
            return Err(error);
        }
        Ok(module)
    }

    /// Charges the image to the context's card, unless it is already loaded.
    fn load_into(&'static self, context: &'static Context) -> Result<(), CudaError> {
        let mut own = locked(&self.context);
        if own.is_none() {
            context.device.charge(self.bytes)?;
            *own = Some(context);
            self.owner.store(context.id, Ordering::Release);
        }
        Ok(())
    }

    fn unload_from_context(&'static self) {
        let own = locked(&self.context).take();
        self.owner.store(0, Ordering::Release);
        if let Some(context) = own {
            for (_, (pointer, _)) in std::mem::take(&mut *locked(&self.globals)) {
                let _ = memory::free(pointer);
            }
            for function in locked(&self.functions).values() {
                function.ready_in.store(0, Ordering::Release);
            }
            let loaded = std::mem::take(&mut *locked(&self.loaded_functions));
            context.device.refund(self.bytes);
            if loaded > 0 {
                context.device.refund(loaded);
            }
        }
    }

    fn unload(&'static self) -> bool {
        if !self.alive.swap(false, Ordering::AcqRel) {
            return false;
        }
        for function in locked(&self.functions).values() {
            function.alive.store(false, Ordering::Release);
        }
        self.unload_from_context();
        true
    }

    fn context(&self) -> Option<&'static Context> {
        *locked(&self.context)
    }

    /// Returns a function by name: any name, unless the image is PTX and does not declare it.
    fn function(&'static self, name: &CStr) -> Result<&'static Function, CudaError> {
        if name.is_empty() || !self.image.has_function(name) {
            return Err(CudaError::NOT_FOUND);
        }
        let mut functions = locked(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(function);
        }
        let peers = PeerGroup::from_name(name.to_bytes());
        let new = || Function {
            name: name.to_owned(),
            module: self,
            duration: if peers.is_some() { 0 } else { duration(name) },
            peers,
            load_bytes: load_bytes(name),
            ready_in: AtomicU64::new(0),
            alive: AtomicBool::new(true),
            dynamic_shared: AtomicI32::new(0),
            carveout: AtomicI32::new(-1),
            cluster: [const { AtomicI32::new(0) }; 3],
            block: [const { AtomicU32::new(1) }; 3],
        };
        let function = FUNCTIONS.make(new, |_| ()).ok_or(CudaError::OUT_OF_MEMORY)?;
        functions.insert(name.to_owned(), function);
        Ok(function)
    }

    /// Returns a global variable: zeroed, of the size declared in the image or one page.
    fn global(&'static self, name: &CStr) -> Result<(CUdeviceptr, usize), CudaError> {
        let context = self.context().ok_or(CudaError::INVALID_CONTEXT)?;
        let size = self.image.global(name).ok_or(CudaError::NOT_FOUND)?;
        let mut globals = locked(&self.globals);
        if let Some(&found) = globals.get(name) {
            return Ok(found);
        }
        let pointer = memory::allocate(context, size)?;
        globals.insert(name.to_owned(), (pointer, size));
        Ok((pointer, size))
    }
}

impl Function {
    /// Returns the dynamic shared memory that a launch may use; more must be enabled by an attribute first.
    #[inline]
    pub(super) fn max_dynamic_shared(&self) -> u32 {
        match self.dynamic_shared.load(Ordering::Relaxed) {
            0 => 48 << 10,
            set => set.unsigned_abs(),
        }
    }

    /// Returns the context into which the module is loaded.
    pub(super) fn context(&self) -> Option<&'static Context> {
        self.module.context()
    }

    /// Checks that the function can be launched in the context, loading it if necessary: a library into the context,
    /// and the function itself, as drivers do with lazy loading.
    #[inline]
    pub(super) fn prepare_launch(&self, context: &'static Context) -> Result<(), CudaError> {
        if self.ready_in.load(Ordering::Acquire) == context.id { Ok(()) } else { self.prepare_slow(context) }
    }

    #[cold]
    fn prepare_slow(&self, context: &'static Context) -> Result<(), CudaError> {
        self.load_into(context)?;
        let mut loaded = locked(&self.module.loaded_functions);
        // A library that is loaded into another context keeps its functions there.
        if self.module.owner.load(Ordering::Acquire) != context.id
            || self.ready_in.load(Ordering::Acquire) == context.id
        {
            return Ok(());
        }
        if self.load_bytes > 0 {
            context.device.charge(self.load_bytes)?;
            *loaded += self.load_bytes;
        }
        self.ready_in.store(context.id, Ordering::Release);
        Ok(())
    }

    /// Checks that the function belongs to the context, loading a library into it if necessary.
    #[inline]
    pub(super) fn load_into(&self, context: &'static Context) -> Result<(), CudaError> {
        if self.module.owner.load(Ordering::Acquire) == context.id {
            return Ok(());
        }
        if !self.module.library {
            return Err(CudaError::INVALID_HANDLE);
        }
        self.module.load_into(context)
    }
}

/// Returns the duration of a launch in nanoseconds: from the name (`busy_200us`, also mangled), or the node's
/// default.
fn duration(name: &CStr) -> u64 {
    let default_duration =
        || session().map_or(0, |session| u64::from(session.node.config().settings.kernel_micros) * 1000);
    named_duration(name.to_bytes()).unwrap_or_else(default_duration)
}

/// Returns the memory that a function takes at its first launch: from its name (`loads_4mib`), or the node's default.
fn load_bytes(name: &CStr) -> u64 {
    const MAX_MEBIBYTES: u64 = 1 << 20;
    let default =
        || session().map_or(0, |session| u64::from(session.node.config().settings.kernel_mebibytes));
    named_mebibytes(name.to_bytes()).unwrap_or_else(default).min(MAX_MEBIBYTES) << 20
}

fn named_mebibytes(name: &[u8]) -> Option<u64> {
    let (number, rest) = number(after(name, b"loads_")?)?;
    rest.starts_with(b"mib").then_some(number)
}

fn named_duration(name: &[u8]) -> Option<u64> {
    let (number, rest) = number(after(name, b"busy_")?)?;
    // Limited to one hour.
    rest.starts_with(b"us").then(|| number.min(3_600_000_000) * 1000)
}

/// Returns what follows the first occurrence of `part` in the name.
fn after<'a>(name: &'a [u8], part: &[u8]) -> Option<&'a [u8]> {
    name.windows(part.len()).position(|window| window == part).map(|start| &name[start + part.len()..])
}

/// Splits off a decimal number at the beginning.
fn number(text: &[u8]) -> Option<(u64, &[u8])> {
    let (digits, rest) = text.split_at(text.iter().take_while(|byte| byte.is_ascii_digit()).count());
    Some((std::str::from_utf8(digits).ok()?.parse().ok()?, rest))
}

/// The kernels for which a kernel waits, from its name: `busy_until_peer_<group>_of_<count>_<micros>us`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerGroup {
    /// Identifies the group on the node.
    pub(super) key: u64,
    /// The number of ranks that must have begun.
    pub(super) count: u64,
    /// The duration after that, in nanoseconds.
    pub(super) duration: u64,
}

impl PeerGroup {
    fn from_name(name: &[u8]) -> Option<Self> {
        const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        const FNV_PRIME: u64 = 0x0100_0000_01b3;
        let rest = after(name, b"busy_until_peer_")?;
        let of = rest.windows(4).position(|window| window == b"_of_")?;
        let (group, rest) = (&rest[..of], &rest[of + 4..]);
        let (count, rest) = number(rest)?;
        let (micros, rest) = number(rest.strip_prefix(b"_")?)?;
        // The count is part of the identity: groups of different sizes cannot meet.
        let bytes = group.iter().copied().chain(count.to_ne_bytes());
        let key = bytes.fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME));
        let duration = micros.min(3_600_000_000) * 1000;
        (count > 0 && rest.starts_with(b"us")).then_some(Self { key, count, duration })
    }
}

#[cfg(test)]
mod tests {
    use super::{PeerGroup, named_duration, named_mebibytes};

    #[test]
    fn duration_is_parsed_from_function_name() {
        assert_eq!(named_duration(b"busy_200us"), Some(200_000));
        assert_eq!(named_duration(b"busy_0us"), Some(0));
        assert_eq!(named_duration(b"_Z10busy_200usPfi"), Some(200_000));
        for other in ["busy_us", "busy_5ms", "matmul", "busy_", "busy_99999999999999999999us"] {
            assert_eq!(named_duration(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn loaded_memory_is_parsed_from_function_name() {
        assert_eq!(named_mebibytes(b"busy_5us_loads_12mib"), Some(12));
        assert_eq!(named_mebibytes(b"loads_0mib"), Some(0));
        for other in ["loads_mib", "loads_5kib", "downloads"] {
            assert_eq!(named_mebibytes(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn peer_group_is_parsed_from_function_name() {
        let group = |name: &str| PeerGroup::from_name(name.as_bytes());
        let of_two = group("busy_until_peer_a_b_of_2_30us").unwrap();
        assert_eq!((of_two.count, of_two.duration), (2, 30_000));
        assert_eq!(group("_Z9busy_until_peer_a_b_of_2_0usPf").map(|same| same.key), Some(of_two.key));
        for other in ["busy_until_peer_a_b_of_3_30us", "busy_until_peer_c_of_2_30us"] {
            assert_ne!(group(other).unwrap().key, of_two.key, "{other}");
        }
        for other in ["busy_30us", "busy_until_peer_a_of_0_1us", "busy_until_peer_a_of_2", "busy_until_peer_"]
        {
            assert_eq!(group(other), None, "{other}");
        }
    }
}

//! Modules and libraries: images of device code, and the functions in them.
//!
//! Nothing of an image is run. Any image is taken, and it has every function that is asked for: only a function's name
//! matters, because it may say how long it takes.

mod image;
mod kernels;
mod modules;

use super::context::Context;
use super::handle::{Arena, handle_of};
use super::session::session;
use super::*;
use crate::state::UNIT;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// An image that was loaded into a context, or, as a library, into none yet.
pub(super) struct Module {
    alive: AtomicBool,
    /// A library's context comes with its first use.
    context: Mutex<Option<&'static Context>>,
    /// Its context's number; zero while it has none.
    owner: AtomicU64,
    image: image::Image,
    /// Bytes of the card it takes.
    bytes: u64,
    /// Whether programs know it as a library.
    library: bool,
    functions: Mutex<BTreeMap<CString, &'static Function>>,
    globals: Mutex<BTreeMap<CString, (CUdeviceptr, usize)>>,
}

/// A function of a module, or a kernel of a library.
pub(super) struct Function {
    pub(super) name: CString,
    pub(super) module: &'static Module,
    /// What a launch takes, in nanoseconds.
    pub(super) duration: u64,
    alive: AtomicBool,
    dynamic_shared: AtomicI32,
    carveout: AtomicI32,
    cluster: [AtomicI32; 3],
    /// Of the launches of old: block and shared memory are set before.
    pub(super) block: [AtomicU32; 3],
}

static MODULES: Arena<Module> = Arena::new();
static FUNCTIONS: Arena<Function> = Arena::new();

/// The function a handle means.
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

/// Modules go with their context.
pub(super) fn drop_all(context: &'static Context) {
    for module in MODULES.live() {
        let own = *locked(&module.context);
        if own.is_some_and(|own| std::ptr::eq(own, context)) {
            if module.library {
                // The library stays, and is loaded again where it is used next.
                module.leave();
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
        image: image::Image,
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
            },
            |_| (),
        );
        let module = made.ok_or(CudaError::OUT_OF_MEMORY)?;
        if let Some(context) = context
            && let Err(error) = module.enter(context)
        {
            module.alive.store(false, Ordering::Release);
            return Err(error);
        }
        Ok(module)
    }

    /// Takes its place on the context's card.
    fn enter(&'static self, context: &'static Context) -> Result<(), CudaError> {
        let mut own = locked(&self.context);
        if own.is_none() {
            context.device.take(self.bytes)?;
            *own = Some(context);
            self.owner.store(context.id, Ordering::Release);
        }
        Ok(())
    }

    fn leave(&'static self) {
        let own = locked(&self.context).take();
        self.owner.store(0, Ordering::Release);
        if let Some(context) = own {
            for (_, (pointer, _)) in std::mem::take(&mut *locked(&self.globals)) {
                let _ = memory::free(pointer);
            }
            context.device.give(self.bytes);
        }
    }

    fn unload(&'static self) -> bool {
        if !self.alive.swap(false, Ordering::AcqRel) {
            return false;
        }
        for function in locked(&self.functions).values() {
            function.alive.store(false, Ordering::Release);
        }
        self.leave();
        true
    }

    fn context(&self) -> Option<&'static Context> {
        *locked(&self.context)
    }

    /// The function of that name: any, unless the image lists what it has and this is not among it.
    fn function(&'static self, name: &CStr) -> Result<&'static Function, CudaError> {
        if name.is_empty() || !self.image.has_function(name) {
            return Err(CudaError::NOT_FOUND);
        }
        let mut functions = locked(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(function);
        }
        let new = || Function {
            name: name.to_owned(),
            module: self,
            duration: duration(name),
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

    /// A variable of the module: zeros, of the size the image says or of a page.
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
    /// Shared memory that a launch may ask for: more than this must be allowed before.
    #[inline]
    pub(super) fn most_shared(&self) -> u32 {
        match self.dynamic_shared.load(Ordering::Relaxed) {
            0 => 48 << 10,
            set => set.unsigned_abs(),
        }
    }

    /// The context its module is loaded into.
    pub(super) fn context(&self) -> Option<&'static Context> {
        self.module.context()
    }

    /// Whether it can be launched in the context; a library's functions can in any.
    #[inline]
    pub(super) fn enter(&self, context: &'static Context) -> Result<(), CudaError> {
        if self.module.owner.load(Ordering::Acquire) == context.id {
            return Ok(());
        }
        if !self.module.library {
            return Err(CudaError::INVALID_HANDLE);
        }
        self.module.enter(context)
    }
}

/// What a function takes, in nanoseconds: its name may say so, as in `busy_200us`, also inside a mangled one.
fn duration(name: &CStr) -> u64 {
    let usual =
        || session().map_or(0, |session| u64::from(session.node.config().settings.kernel_micros) * 1000);
    named_duration(name.to_bytes()).unwrap_or_else(usual)
}

fn named_duration(name: &[u8]) -> Option<u64> {
    let start = name.windows(5).position(|part| part == b"busy_")? + 5;
    let digits = name[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = std::str::from_utf8(&name[start..start + digits]).ok()?.parse::<u64>().ok()?;
    // An hour is more than any kernel takes.
    name[start + digits..].starts_with(b"us").then(|| number.min(3_600_000_000) * 1000)
}

#[cfg(test)]
mod tests {
    use super::named_duration;

    #[test]
    fn names_say_how_long_a_function_takes() {
        assert_eq!(named_duration(b"busy_200us"), Some(200_000));
        assert_eq!(named_duration(b"busy_0us"), Some(0));
        assert_eq!(named_duration(b"_Z10busy_200usPfi"), Some(200_000));
        for other in ["busy_us", "busy_5ms", "matmul", "busy_", "busy_99999999999999999999us"] {
            assert_eq!(named_duration(other.as_bytes()), None, "{other}");
        }
    }
}

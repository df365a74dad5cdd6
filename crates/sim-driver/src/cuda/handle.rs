//! Handles of streams, events, functions and other objects. A handle is the address of an object that is never freed,
//! only reused, so that a stale or invented handle can be checked safely and rejected.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Maximum number of live objects of one kind, far more than a real driver can hold.
const MAX_OBJECTS: usize = 1 << 20;

/// An object and whether it is in use.
struct HandleSlot<T> {
    live: AtomicBool,
    object: MaybeUninit<T>,
}

/// All objects of one kind in this process.
pub(super) struct HandleArena<T: 'static> {
    slots: OnceLock<usize>,
    /// Slots below this index were filled once and hold an object permanently.
    filled: AtomicUsize,
    free: Mutex<Vec<usize>>,
    kind: PhantomData<fn() -> T>,
}

impl<T: Sync + 'static> HandleArena<T> {
    pub(super) const fn new() -> Self {
        Self {
            slots: OnceLock::new(),
            filled: AtomicUsize::new(0),
            free: Mutex::new(Vec::new()),
            kind: PhantomData,
        }
    }

    /// Returns the address of the first slot. Address space is reserved for all slots; memory is committed on first
    /// use.
    fn base(&self) -> usize {
        *self.slots.get_or_init(|| {
            let bytes = MAX_OBJECTS * size_of::<HandleSlot<T>>();
            // SAFETY: a new private anonymous mapping that replaces no other.
            let address = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    bytes,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if address == libc::MAP_FAILED { 0 } else { address as usize }
        })
    }

    /// Returns an object that is not in use: a reused one after `reset`, or a new one. `None` when the arena is full.
    pub(super) fn make(&self, new: impl FnOnce() -> T, reset: impl FnOnce(&'static T)) -> Option<&'static T> {
        let mut free = self.free.lock().ok()?;
        if let Some(index) = free.pop() {
            let slot = self.slot(index)?;
            // SAFETY: a slot is on the free list only after it was filled.
            let object = unsafe { slot.object.assume_init_ref() };
            reset(object);
            slot.live.store(true, Ordering::Release);
            return Some(object);
        }
        let index = self.filled.load(Ordering::Relaxed);
        let base = self.base();
        if base == 0 || index == MAX_OBJECTS {
            return None;
        }
        let address = (base + index * size_of::<HandleSlot<T>>()) as *mut HandleSlot<T>;
        // SAFETY: inside the mapping and aligned, and no other thread accesses it before `filled` includes it.
        unsafe { address.write(HandleSlot { live: AtomicBool::new(true), object: MaybeUninit::new(new()) }) };
        self.filled.store(index + 1, Ordering::Release);
        let slot = self.slot(index)?;
        // SAFETY: the slot was filled above.
        Some(unsafe { slot.object.assume_init_ref() })
    }

    fn slot(&self, index: usize) -> Option<&'static HandleSlot<T>> {
        if index >= self.filled.load(Ordering::Acquire) {
            return None;
        }
        let address = (self.base() + index * size_of::<HandleSlot<T>>()) as *const HandleSlot<T>;
        // SAFETY: the slot is filled, and slots are never unmapped or moved.
        Some(unsafe { &*address })
    }

    fn index(&self, address: usize) -> Option<usize> {
        let offset = address.checked_sub(*self.slots.get()? + std::mem::offset_of!(HandleSlot<T>, object))?;
        (offset % size_of::<HandleSlot<T>>() == 0).then_some(offset / size_of::<HandleSlot<T>>())
    }

    /// Returns the object with this handle if it is in use.
    #[inline]
    pub(super) fn get<H>(&self, handle: *mut H) -> Option<&'static T> {
        let size = size_of::<HandleSlot<T>>();
        let slots = *self.slots.get()?;
        let slot = (handle as usize).wrapping_sub(std::mem::offset_of!(HandleSlot<T>, object));
        let offset = slot.wrapping_sub(slots);
        if offset >= self.filled.load(Ordering::Acquire) * size || offset % size != 0 {
            return None;
        }
        // SAFETY: the slot is below `filled`, and slots are never unmapped or moved.
        let slot = unsafe { &*(slot as *const HandleSlot<T>) };
        if !slot.live.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: slots below `filled` hold an initialized object.
        Some(unsafe { slot.object.assume_init_ref() })
    }

    /// Takes an object out of use; returns false if it was not in use.
    pub(super) fn drop<H>(&self, handle: *mut H) -> bool {
        let Some(index) = self.index(handle as usize) else { return false };
        let Some(slot) = self.slot(index) else { return false };
        if !slot.live.swap(false, Ordering::AcqRel) {
            return false;
        }
        if let Ok(mut free) = self.free.lock() {
            free.push(index);
        }
        true
    }

    /// Returns the objects in use.
    pub(super) fn live(&self) -> impl Iterator<Item = &'static T> {
        (0..self.filled.load(Ordering::Acquire))
            .filter_map(|index| self.slot(index))
            .filter(|slot| slot.live.load(Ordering::Acquire))
            // SAFETY: slots below `filled` hold an initialized object.
            .map(|slot| unsafe { slot.object.assume_init_ref() })
    }
}

/// Returns the handle of an object in a [`HandleArena`].
pub(super) fn handle_of<T, H>(object: &'static T) -> *mut H {
    std::ptr::from_ref(object).cast_mut().cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn stale_and_invented_handles_are_rejected() {
        static ARENA: HandleArena<AtomicU32> = HandleArena::new();
        assert!(ARENA.get(8 as *mut u8).is_none());
        let one = ARENA.make(|| AtomicU32::new(1), |_| ()).unwrap();
        let two = ARENA.make(|| AtomicU32::new(2), |_| ()).unwrap();
        let handle: *mut u8 = handle_of(one);
        assert_eq!(ARENA.get(handle).unwrap().load(Ordering::Relaxed), 1);
        for wrong in [0, 1, 2, usize::MAX, handle as usize + 1, handle as usize + (1 << 20)] {
            assert!(ARENA.get(wrong as *mut u8).is_none(), "{wrong:x}");
        }
        assert!(ARENA.drop(handle) && !ARENA.drop(handle));
        assert!(ARENA.get(handle).is_none());
        let again = ARENA.make(|| AtomicU32::new(3), |old| old.store(4, Ordering::Relaxed)).unwrap();
        assert!(std::ptr::eq(again, one));
        assert_eq!(again.load(Ordering::Relaxed), 4);
        assert_eq!(ARENA.live().count(), 2);
        assert_eq!(two.load(Ordering::Relaxed), 2);
    }
}

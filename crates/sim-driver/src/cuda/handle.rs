//! Handles: what a program holds of a stream, an event, a function. They are addresses of objects that are never freed,
//! only used again, so that a stale or invented handle can be looked at safely and refused.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Objects of one kind that can live at a time: far more than a driver has room for.
const MOST: usize = 1 << 20;

struct Cell<T> {
    live: AtomicBool,
    object: MaybeUninit<T>,
}

/// All objects of one kind in this process.
pub(super) struct Arena<T: 'static> {
    cells: OnceLock<usize>,
    /// Cells below this have been filled once and hold an object for good.
    filled: AtomicUsize,
    free: Mutex<Vec<usize>>,
    kind: PhantomData<fn() -> T>,
}

impl<T: Sync + 'static> Arena<T> {
    pub(super) const fn new() -> Self {
        Self {
            cells: OnceLock::new(),
            filled: AtomicUsize::new(0),
            free: Mutex::new(Vec::new()),
            kind: PhantomData,
        }
    }

    /// The first cell. Address space is reserved for all of them; memory comes when they are touched.
    fn base(&self) -> usize {
        *self.cells.get_or_init(|| {
            let bytes = MOST * size_of::<Cell<T>>();
            // SAFETY: a new private mapping over no other.
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

    /// An object that is not in use: a used one that `again` makes fresh, or a new one. `None` when there is no room.
    pub(super) fn make(&self, new: impl FnOnce() -> T, again: impl FnOnce(&'static T)) -> Option<&'static T> {
        let mut free = self.free.lock().ok()?;
        if let Some(index) = free.pop() {
            let cell = self.cell(index)?;
            // SAFETY: the cell was filled before it was freed.
            let object = unsafe { cell.object.assume_init_ref() };
            again(object);
            cell.live.store(true, Ordering::Release);
            return Some(object);
        }
        let index = self.filled.load(Ordering::Relaxed);
        let base = self.base();
        if base == 0 || index == MOST {
            return None;
        }
        let address = (base + index * size_of::<Cell<T>>()) as *mut Cell<T>;
        // SAFETY: inside the mapping, aligned, and nobody else's until `filled` says that it is there.
        unsafe { address.write(Cell { live: AtomicBool::new(true), object: MaybeUninit::new(new()) }) };
        self.filled.store(index + 1, Ordering::Release);
        let cell = self.cell(index)?;
        // SAFETY: filled on the line above.
        Some(unsafe { cell.object.assume_init_ref() })
    }

    fn cell(&self, index: usize) -> Option<&'static Cell<T>> {
        if index >= self.filled.load(Ordering::Acquire) {
            return None;
        }
        let address = (self.base() + index * size_of::<Cell<T>>()) as *const Cell<T>;
        // SAFETY: filled, and never unmapped or moved.
        Some(unsafe { &*address })
    }

    fn index(&self, address: usize) -> Option<usize> {
        let offset = address.checked_sub(*self.cells.get()? + std::mem::offset_of!(Cell<T>, object))?;
        (offset % size_of::<Cell<T>>() == 0).then_some(offset / size_of::<Cell<T>>())
    }

    /// The object a handle means, if it means one that is in use.
    #[inline]
    pub(super) fn get<H>(&self, handle: *mut H) -> Option<&'static T> {
        let size = size_of::<Cell<T>>();
        let cells = *self.cells.get()?;
        let cell = (handle as usize).wrapping_sub(std::mem::offset_of!(Cell<T>, object));
        let offset = cell.wrapping_sub(cells);
        if offset >= self.filled.load(Ordering::Acquire) * size || offset % size != 0 {
            return None;
        }
        // SAFETY: one of the cells that `filled` counts, which are never unmapped or moved.
        let cell = unsafe { &*(cell as *const Cell<T>) };
        if !cell.live.load(Ordering::Acquire) {
            return None;
        }
        // SAFETY: such a cell holds an object.
        Some(unsafe { cell.object.assume_init_ref() })
    }

    /// Takes the object out of use; false if it was not in use.
    pub(super) fn drop<H>(&self, handle: *mut H) -> bool {
        let Some(index) = self.index(handle as usize) else { return false };
        let Some(cell) = self.cell(index) else { return false };
        if !cell.live.swap(false, Ordering::AcqRel) {
            return false;
        }
        if let Ok(mut free) = self.free.lock() {
            free.push(index);
        }
        true
    }

    /// The objects in use.
    pub(super) fn live(&self) -> impl Iterator<Item = &'static T> {
        (0..self.filled.load(Ordering::Acquire))
            .filter_map(|index| self.cell(index))
            .filter(|cell| cell.live.load(Ordering::Acquire))
            // SAFETY: as in `get`.
            .map(|cell| unsafe { cell.object.assume_init_ref() })
    }
}

/// The handle of an object of an [`Arena`].
pub(super) fn handle_of<T, H>(object: &'static T) -> *mut H {
    std::ptr::from_ref(object).cast_mut().cast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn only_handles_in_use_mean_something() {
        static ARENA: Arena<AtomicU32> = Arena::new();
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

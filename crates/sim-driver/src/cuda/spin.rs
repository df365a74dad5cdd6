//! A lock for a few instructions on every allocation: one atomic operation to take, none to let go.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

/// Something that one thread at a time looks at, for a moment.
pub(super) struct Spin<T> {
    taken: AtomicBool,
    inside: UnsafeCell<T>,
}

// SAFETY: whoever holds the lock is the only one who reaches what is inside.
unsafe impl<T: Send> Sync for Spin<T> {}

impl<T> Spin<T> {
    pub(super) const fn new(inside: T) -> Self {
        Self { taken: AtomicBool::new(false), inside: UnsafeCell::new(inside) }
    }

    #[inline]
    pub(super) fn lock(&self) -> Held<'_, T> {
        if self.taken.swap(true, Ordering::Acquire) {
            self.wait();
        }
        Held(self, PhantomData)
    }

    #[cold]
    fn wait(&self) {
        loop {
            for _ in 0..100 {
                if !self.taken.load(Ordering::Relaxed) && !self.taken.swap(true, Ordering::Acquire) {
                    return;
                }
                std::hint::spin_loop();
            }
            // Its holder has no processor.
            std::thread::yield_now();
        }
    }
}

/// The lock, held. What is inside is shared by whoever shares this.
pub(super) struct Held<'a, T>(&'a Spin<T>, PhantomData<&'a mut T>);

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: nobody else is inside while the lock is held.
        unsafe { &*self.0.inside.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: likewise.
        unsafe { &mut *self.0.inside.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::Spin;

    #[test]
    fn threads_come_one_after_the_other() {
        let sum = Spin::new(0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100_000).for_each(|_| *sum.lock() += 1));
            }
        });
        assert_eq!(*sum.lock(), 400_000);
    }
}

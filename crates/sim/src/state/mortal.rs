//! Places where a process may be killed. They do nothing but in tests, where a thread can be told to stop for good at
//! the n-th place it comes to, as if its process had been killed there.

/// A place to die.
#[inline(always)]
pub(super) fn may_die_here() {
    #[cfg(test)]
    test::count_down();
}

#[cfg(test)]
pub(super) mod test {
    use std::cell::Cell;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
        static DEATH: Cell<Option<std::sync::mpsc::Sender<()>>> = const { Cell::new(None) };
    }

    pub(super) fn count_down() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                DEATH.take().unwrap().send(()).unwrap();
                loop {
                    std::thread::park();
                }
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }

    /// Does `work` on a thread that dies at the n-th place; false if it lived to the end.
    pub(in super::super) fn dies(n: u32, work: impl FnOnce() + Send + 'static) -> bool {
        let (died, death) = channel();
        std::thread::spawn(move || {
            LEFT.set(Some(n));
            DEATH.set(Some(died));
            work();
            LEFT.set(None);
        });
        match death.recv_timeout(Duration::from_secs(60)) {
            Ok(()) => true,
            Err(RecvTimeoutError::Disconnected) => false,
            Err(RecvTimeoutError::Timeout) => panic!("the work neither ends nor dies"),
        }
    }
}

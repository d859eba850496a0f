//! Processors that do not sleep while a time is measured.
#![allow(unsafe_code)] // sched_setscheduler(2), for a class that the standard library does not know; one call

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Keeps every processor busy with threads that yield to anybody else (`SCHED_IDLE`).
///
/// A processor with nothing to do sleeps, and a virtual one is given back to its host: to wake it costs tens of
/// microseconds that no subject has spent. Where an engine computes beside the router, none is asleep.
pub(super) struct Awake {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Awake {
    pub(super) fn keep() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let spin = |_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                if yields_to_all() {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                }
            })
        };
        let threads = (0..processors).map(spin).collect();
        Self { stop, threads }
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It does nothing that could panic.
            let _ = thread.join();
        }
    }
}

/// Whether this thread now runs only where no other wants to; one that does not would take time from what is measured.
fn yields_to_all() -> bool {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel only reads the parameters, which live until it returns.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) == 0 }
}

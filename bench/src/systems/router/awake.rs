//! Processors that do not sleep while a time is measured.
#![allow(unsafe_code)] // sched_setscheduler(2), for a class that the standard library does not know; one call

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Keeps every processor busy with threads that yield to anybody else (`SCHED_IDLE`).
///
/// A processor with nothing to do sleeps, and a virtual one is given back to its host; what it costs to wake it is no
/// subject's doing. On an idle 2-core guest awake cores changed what the router adds to the first token by less than runs
/// differ (medians of 106 and 105 µs, 2026-11-21, `docs/performance/router.md`); other routers added 16 and 21 % less.
pub(super) struct Awake {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Awake {
    /// # Errors
    /// Where the system does not let a thread yield to all others: then nothing is kept awake.
    pub(super) fn keep() -> std::io::Result<Self> {
        let mut awake = Self { stop: Arc::default(), threads: Vec::new() };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let (tell, told) = std::sync::mpsc::sync_channel(processors);
        for _ in 0..processors {
            let (stop, tell) = (Arc::clone(&awake.stop), tell.clone());
            awake.threads.push(std::thread::spawn(move || {
                let yields = yields_to_all();
                let may_spin = yields.is_ok();
                // Somebody waits until each has said it.
                let _ = tell.send(yields);
                drop(tell);
                while may_spin && !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }));
        }
        drop(tell);
        told.into_iter().collect::<std::io::Result<()>>()?;
        Ok(awake)
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

/// From now on this thread runs only where no other wants to; one that does not would take time from what is measured.
fn yields_to_all() -> std::io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel only reads the parameters, which live until it returns.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

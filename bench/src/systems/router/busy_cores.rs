//! Keeps processors awake during a measurement.
#![allow(
    unsafe_code,
    reason = "sched_setscheduler(2), for a class that the standard library does not know; one call"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Keeps every processor busy with threads that yield to all others (`SCHED_IDLE`).
///
/// An idle processor sleeps, and a virtual one is given back to its host. The cost of waking it is not caused by the
/// gateway. The effect on the results is in `docs/performance/router.md`.
pub(super) struct BusyCores {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl BusyCores {
    /// # Errors
    /// If the system does not let a thread yield to all others. Then no processor is kept awake.
    pub(super) fn keep() -> std::io::Result<Self> {
        let mut awake = Self { stop: Arc::default(), threads: Vec::new() };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let (sender, results) = std::sync::mpsc::sync_channel(processors);
        for _ in 0..processors {
            let (stop, sender) = (Arc::clone(&awake.stop), sender.clone());
            awake.threads.push(std::thread::spawn(move || {
                let yields = yields_to_all();
                let may_spin = yields.is_ok();
                // The receiver waits for every thread's result.
                let _ = sender.send(yields);
                drop(sender);
                while may_spin && !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }));
        }
        drop(sender);
        results.into_iter().collect::<std::io::Result<()>>()?;
        Ok(awake)
    }
}

impl Drop for BusyCores {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The thread cannot panic.
            let _ = thread.join();
        }
    }
}

/// Lets this thread run only if no other wants to. Otherwise it would take time from the measurement.
fn yields_to_all() -> std::io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel only reads the parameters, which outlive the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

//! When to stop: Ctrl-C, SIGTERM, or the end of a supervisor's pipe.

use std::io::Read;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Cancels the token at the first signal. A second signal ends the process at once. Peers then detect the end by
/// themselves: leases expire and connections break.
///
/// # Errors
/// When the signal handlers cannot be installed.
pub(crate) fn on_signal(until_stdin_ends: bool) -> std::io::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let cancel = token.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            () = stdin_end(until_stdin_ends) => {}
        }
        cancel.cancel();
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        tracing::warn!(event = "second_signal_received", "second signal received, exiting");
        // Nothing is settled. Peers detect the end by themselves.
        #[allow(clippy::disallowed_methods, reason = "a second signal ends the process at once")]
        std::process::exit(130);
    });
    Ok(token)
}

/// Reads on a thread of its own that ends with the process. A runtime would wait for the read.
async fn stdin_end(wanted: bool) {
    if !wanted {
        return std::future::pending().await;
    }
    let ended = CancellationToken::new();
    let tell = ended.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        let mut stdin = std::io::stdin().lock();
        while matches!(stdin.read(&mut buffer), Ok(1..)) {}
        tell.cancel();
    });
    ended.cancelled().await;
}

//! Random numbers of the kernel.

use std::cell::RefCell;

/// Ids read from the kernel at once, because a call per request would cost as much as a read.
pub(super) const ID_BATCH: usize = 32;

/// Random bytes.
///
/// # Panics
/// The kernel has no source of randomness. It always has one after boot.
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the kernel's random numbers are there from boot on");
    bytes
}

/// 16 unique random bytes.
pub(crate) fn id() -> [u8; 16] {
    thread_local! {
        static STOCK: RefCell<Vec<[u8; 16]>> = const { RefCell::new(Vec::new()) };
    }
    STOCK.with_borrow_mut(|stock| {
        if stock.is_empty() {
            stock.extend_from_slice(bytes::<{ 16 * ID_BATCH }>().as_chunks().0);
        }
        stock.pop().expect("it was just filled")
    })
}

/// A random number from 0 to 1.
pub(crate) fn fraction() -> f64 {
    f64::from(bytes::<1>()[0]) / 255.0
}

/// A seed that is no secret; 0 without a source of randomness.
pub(crate) fn seed() -> u64 {
    let mut bytes = [0; 8];
    let _ = getrandom::fill(&mut bytes);
    u64::from_ne_bytes(bytes)
}

//! Rows of activations that threads share.
#![allow(unsafe_code, reason = "a pointer shared by the workers, which use disjoint parts")]

/// A pointer that workers share. They use disjoint parts of its memory.
#[derive(Debug)]
pub(super) struct SharedPtr<T>(pub(super) *mut T);

impl<T> Clone for SharedPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedPtr<T> {}
// SAFETY: a pointer alone is harmless; each dereference states why its range is disjoint from others.
unsafe impl<T: Send> Send for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    /// # Safety
    /// `offset` is inside the allocation.
    pub(super) unsafe fn at(self, offset: usize) -> *mut T {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(offset) }
    }
}

/// Rows of activations: `count` rows of `stride` values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) base: SharedPtr<f32>,
    pub(super) stride: usize,
}

impl Rows {
    /// Row `row` as a slice.
    ///
    /// # Safety
    /// The row has `width` values. Until the slice is dropped, no other code uses the row (or writes it, if the slice
    /// is only read).
    #[allow(clippy::mut_from_ref, reason = "each row belongs to one worker, by index")]
    pub(super) unsafe fn row(&self, row: usize, width: usize) -> &mut [f32] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.at(row * self.stride), width) }
    }
}

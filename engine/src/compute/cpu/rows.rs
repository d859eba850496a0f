//! Rows of activations, as threads share them.
#![allow(unsafe_code)] // a pointer shared by the members of a team, which use disjoint parts

/// A pointer that members of a team may share; they use disjoint parts of what it points to.
#[derive(Debug)]
pub(super) struct Shared<T>(pub(super) *mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}
// SAFETY: a pointer by itself is harmless; each dereference says why its range is disjoint from others.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
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
    pub(super) base: Shared<f32>,
    pub(super) stride: usize,
}

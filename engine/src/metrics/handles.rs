//! Counters and histograms whose labels are known at their first event. That event creates the handle under the
//! registry's lock; later events find it without the lock.

use std::sync::OnceLock;

/// More than the different labels of any name.
const LABELS_MAX: usize = 32;

/// The handles of one name, by two labels that are constants of this crate.
pub(super) struct HandleCache<H> {
    made: [OnceLock<([&'static str; 2], H)>; LABELS_MAX],
}

impl<H> Default for HandleCache<H> {
    fn default() -> Self {
        Self { made: std::array::from_fn(|_| OnceLock::new()) }
    }
}

impl<H> HandleCache<H> {
    /// Calls `then` with the handle for these labels. `make` creates it the first time.
    pub(super) fn with<T>(
        &self,
        labels: [&'static str; 2],
        make: impl Fn() -> H,
        then: impl FnOnce(&H) -> T,
    ) -> T {
        for place in &self.made {
            // Slots are filled from the front. A slot that another thread has just filled with other labels is
            // skipped.
            let (theirs, handle) = place.get_or_init(|| (labels, make()));
            if *theirs == labels {
                return then(handle);
            }
        }
        // More labels than expected only take the lock each time.
        then(&make())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_handle_is_made_once_for_its_labels_and_any_number_of_labels_works() {
        let (handles, made) = (HandleCache::default(), Cell::new(0));
        let words: Vec<&'static str> = (0..40).map(|i| &*Box::leak(i.to_string().into_boxed_str())).collect();
        let ask = |word| {
            let make = || {
                made.set(made.get() + 1);
                word
            };
            handles.with([word, ""], make, |handle: &&str| assert_eq!(*handle, word));
        };
        for _ in 0..3 {
            words[..LABELS_MAX].iter().for_each(|word| ask(word));
            assert_eq!(made.get(), LABELS_MAX);
        }
        words.iter().for_each(|word| ask(word));
        assert_eq!(made.get(), 40);
    }
}

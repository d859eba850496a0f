//! Counters and histograms whose labels are known when the first event comes: that one makes the handle, under the
//! registry's lock, and the ones behind it find it without.

use std::sync::OnceLock;

/// Different labels of one name: there are fewer of any.
const LABELS_MAX: usize = 32;

/// The handles of one name, by two labels of this crate's own words.
pub(super) struct Handles<H> {
    made: [OnceLock<([&'static str; 2], H)>; LABELS_MAX],
}

impl<H> Default for Handles<H> {
    fn default() -> Self {
        Self { made: std::array::from_fn(|_| OnceLock::new()) }
    }
}

impl<H> Handles<H> {
    /// Does something with the handle for these labels; `make` makes it the first time.
    pub(super) fn with<T>(
        &self,
        labels: [&'static str; 2],
        make: impl Fn() -> H,
        then: impl FnOnce(&H) -> T,
    ) -> T {
        for place in &self.made {
            // Places fill from the front; one that another thread has just filled with other labels is passed.
            let (theirs, handle) = place.get_or_init(|| (labels, make()));
            if *theirs == labels {
                return then(handle);
            }
        }
        // More labels than expected cost the lock each time, and nothing else.
        then(&make())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_handle_is_made_once_for_its_labels_and_any_number_of_labels_works() {
        let (handles, made) = (Handles::default(), Cell::new(0));
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

//! Markers in a stream of characters.

/// Finds markers. Text that may begin one is held back. No marker of a set is a part of another one.
#[derive(Clone, Debug)]
pub(super) struct MarkerMatcher {
    markers: &'static [&'static str],
    held: String,
}

impl MarkerMatcher {
    pub(super) fn new(markers: &'static [&'static str]) -> Self {
        Self { markers, held: String::new() }
    }

    /// Adds a character. `free` gets the characters that belong to no marker. Returns the marker that it completes.
    pub(super) fn push(&mut self, character: char, mut free: impl FnMut(char)) -> Option<&'static str> {
        self.held.push(character);
        loop {
            if let Some(found) = self.markers.iter().copied().find(|marker| *marker == self.held) {
                self.held.clear();
                return Some(found);
            }
            let may_begin = self.markers.iter().any(|marker| marker.starts_with(self.held.as_str()));
            if self.held.is_empty() || may_begin {
                return None;
            }
            free(self.held.remove(0));
        }
    }

    /// The text ends: what is held back begins no marker.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

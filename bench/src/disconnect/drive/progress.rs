//! The progress of a run on the terminal: one line per segment. The seconds are those of the report's plots and count
//! from the first segment. Earlier lines have none.

use std::sync::OnceLock;

use crate::load::Moment;

/// See the module's documentation.
pub(crate) struct Progress {
    silent: bool,
    /// The begin of the first segment, microseconds since the Unix epoch.
    began_us: OnceLock<u64>,
}

impl Progress {
    pub(crate) fn new(silent: bool) -> Self {
        Self { silent, began_us: OnceLock::new() }
    }

    /// A segment has begun at this time, which is the one in the raw events.
    pub(crate) fn begin_segment(&self, name: &str, at_us: u64) {
        self.began_us.get_or_init(|| at_us);
        self.print(name, at_us);
    }

    /// Prints an activity outside segments.
    pub(crate) fn print_status(&self, what: &str) {
        self.print(what, Moment::now().us());
    }

    fn print(&self, what: &str, at_us: u64) {
        if !self.silent {
            crate::note(format_args!("{}", self.line(what, at_us)));
        }
    }

    fn line(&self, what: &str, at_us: u64) -> String {
        match self.began_us.get() {
            Some(began_us) => {
                format!("baton: {:5.1} s  {what}", at_us.saturating_sub(*began_us) as f64 / 1e6)
            }
            None => format!("baton: {:9}{what}", ""),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_count_from_the_first_part_and_there_are_none_before() {
        let progress = Progress::new(true);
        assert_eq!(progress.line("starting", 1_000_000), "baton:          starting");
        progress.begin_segment("calibration", 7_000_000);
        progress.begin_segment("calm 1", 9_500_000);
        assert_eq!(progress.line("calm 1", 9_500_000), "baton:   2.5 s  calm 1");
    }
}

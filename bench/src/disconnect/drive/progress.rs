//! How far a run is, for whoever waits for it: a line for each part. Its seconds are those of the report's plots, and count
//! from the beginning of the first part; what comes before that has none.

use std::sync::OnceLock;

use crate::load::Moment;

/// See the module's documentation.
pub(crate) struct Progress {
    silent: bool,
    /// When the first part began, microseconds since the Unix epoch.
    began_us: OnceLock<u64>,
}

impl Progress {
    pub(crate) fn new(silent: bool) -> Self {
        Self { silent, began_us: OnceLock::new() }
    }

    /// A part has begun at this moment, which is the one in the raw events.
    pub(crate) fn part(&self, name: &str, at_us: u64) {
        self.began_us.get_or_init(|| at_us);
        self.tell(name, at_us);
    }

    /// What happens now, and is no part.
    pub(crate) fn say(&self, what: &str) {
        self.tell(what, Moment::now().us());
    }

    fn tell(&self, what: &str, at_us: u64) {
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
        progress.part("calibration", 7_000_000);
        progress.part("calm 1", 9_500_000);
        assert_eq!(progress.line("calm 1", 9_500_000), "baton:   2.5 s  calm 1");
    }
}

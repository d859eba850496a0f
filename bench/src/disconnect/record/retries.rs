//! What clients that ran out of patience asked again, as SDKs do, and what became of that. They count neither as clients that
//! left nor as ones that stayed; this is all that is said of them.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::disconnect::record::raw::CallRecord;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Retries {
    /// Calls that ask again what a call before had asked.
    pub(crate) asked: u64,
    /// Of those, got no whole answer.
    pub(crate) failed: u64,
    /// Clients that had no whole answer when they asked no more.
    pub(crate) gave_up: u64,
}

impl Retries {
    /// Of those among these calls that ask again.
    pub(crate) fn of<'a>(calls: impl IntoIterator<Item = &'a CallRecord>) -> Self {
        let mut retries = Self::default();
        // The last of each client: when it began, and whether it failed.
        let mut last: BTreeMap<&str, (u64, bool)> = BTreeMap::new();
        for call in calls {
            let Some(first) = &call.retries else { continue };
            let failed = call.outcome != "done";
            retries.asked += 1;
            retries.failed += u64::from(failed);
            let last = last.entry(first).or_default();
            *last = (*last).max((call.began_us, failed));
        }
        retries.gave_up = last.values().filter(|(_, failed)| *failed).count() as u64;
        retries
    }

    /// In words; `None` where nothing was asked again.
    pub(crate) fn told(&self) -> Option<String> {
        let Self { asked, failed, gave_up } = self;
        (*asked > 0).then(|| {
            format!("{asked} retries, {failed} of them failed, {gave_up} clients without a response")
        })
    }
}

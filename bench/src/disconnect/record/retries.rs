//! Retries of clients with a timeout, as SDKs make them, and their outcomes. Retries count neither as cancelled nor as
//! uncancelled requests.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::disconnect::record::raw::CallRecord;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct RetryCounts {
    /// Calls that retry an earlier call.
    pub(crate) asked: u64,
    /// Retries without a complete response.
    pub(crate) failed: u64,
    /// Clients whose last retry had no complete response.
    pub(crate) gave_up: u64,
}

impl RetryCounts {
    /// Counts the retries among these calls.
    pub(crate) fn of<'a>(calls: impl IntoIterator<Item = &'a CallRecord>) -> Self {
        let mut retries = Self::default();
        // The last retry of each client: its start, and whether it failed.
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

    /// As text; `None` without retries.
    pub(crate) fn describe(&self) -> Option<String> {
        let Self { asked, failed, gave_up } = self;
        (*asked > 0).then(|| {
            format!("{asked} retries, {failed} of them failed, {gave_up} clients without a response")
        })
    }
}

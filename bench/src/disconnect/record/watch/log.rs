//! The new events of a page of an engine's event log.

use serde_json::Value;

/// A page, read by the numbers of its events.
#[derive(Debug, PartialEq)]
pub(super) struct LogPage<'a> {
    /// Events that no earlier page had, in order.
    pub(super) fresh: Vec<&'a Value>,
    /// The number after which the next page begins; `None` if the log does not advance and would return the same page
    /// again.
    pub(super) next: Option<u64>,
}

/// Reads a page that was requested after this number. An event whose number was read before is the same event.
pub(super) fn read(page: &Value, after: u64) -> LogPage<'_> {
    let events = page["events"].as_array().map_or(&[][..], Vec::as_slice);
    let mut last = after;
    let is_fresh = |event: &&Value| {
        let number = event["seq"].as_u64().filter(|number| *number > last);
        last = number.unwrap_or(last);
        number.is_some()
    };
    let fresh = events.iter().filter(is_fresh).collect();
    let next = page["next"].as_u64();
    let gets_on = next.filter(|next| *next > after || (*next == after && events.is_empty()));
    LogPage { fresh, next: gets_on }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_is_new_once_and_a_stalled_event_log_is_abandoned() {
        let page = |numbers: &[u64], next: Value| {
            let events: Vec<_> = numbers.iter().map(|number| json!({"seq": number})).collect();
            json!({"events": events, "next": next})
        };
        let result = |page: &Value, after| {
            let LogPage { fresh, next } = read(page, after);
            (fresh.iter().filter_map(|event| event["seq"].as_u64()).collect::<Vec<_>>(), next)
        };
        assert_eq!(result(&page(&[5, 6, 7], 7.into()), 4), (vec![5, 6, 7], Some(7)));
        assert_eq!(result(&page(&[], 4.into()), 4), (vec![], Some(4)));
        // A page that begins before the requested number, and one with an event twice.
        assert_eq!(result(&page(&[3, 4, 5], 5.into()), 4), (vec![5], Some(5)));
        assert_eq!(result(&page(&[5, 5, 6], 6.into()), 4), (vec![5, 6], Some(6)));
        // The same page again.
        assert_eq!(result(&page(&[3, 4], 4.into()), 4), (vec![], None));
        assert_eq!(result(&page(&[5, 6], 4.into()), 4), (vec![5, 6], None));
        // A page whose `next` is lower than before, or missing.
        assert_eq!(result(&page(&[], 2.into()), 4), (vec![], None));
        assert_eq!(result(&page(&[5], Value::Null), 4), (vec![5], None));
    }
}

//! The router's own log: repeated failures are rate-limited, and lines contain the request's id.

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::harness::client::{completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

/// Collects the router's warnings as text. A line begins with its span.
#[derive(Clone, Default)]
pub(crate) struct Warnings {
    lines: Arc<Mutex<Vec<String>>>,
    /// Target and text of each span, by id.
    spans: Arc<Mutex<Vec<(String, String)>>>,
}

impl Warnings {
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }
}

struct WarningText(String);

impl Visit for WarningText {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("baton_router") && *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = WarningText(String::new());
        if let Some(parent) = event.parent() {
            let (target, span) = &self.spans.lock().unwrap()[parent.into_u64() as usize - 1];
            // A filter by module would otherwise hide the span of a line that it shows.
            if target == event.metadata().target() {
                text.0.push_str(span);
            }
        }
        event.record(&mut text);
        self.lines.lock().unwrap().push(text.0);
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut text = WarningText(span.metadata().name().to_owned());
        span.record(&mut text);
        let mut spans = self.spans.lock().unwrap();
        spans.push((span.metadata().target().to_owned(), text.0));
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn an_unreachable_engine_is_logged_seldom_with_a_request_id() {
    const REQUESTS: usize = 40;
    let warnings = Warnings::default();
    // The test's runtime has one thread, which runs the whole router.
    let _guard = tracing::subscriber::set_default(warnings.clone());
    let down = FakeEngine::always(Action::Hang).await;
    let address = down.address.to_string();
    down.die().await;
    let d = FakeEngine::always(Action::Refuse(500, serde_json::json!({"error": {"message": "x"}}))).await;
    let system = TestRouter::start(&[], &[&d]).await;
    let dead = FakeEngine::at(address.parse().unwrap(), Action::Close).await;
    let both = TestRouter::start(&[&dead], &[&d]).await;
    for _ in 0..REQUESTS {
        assert!(post(system.address, "/v1/completions", &completion(false)).await.status >= 500);
        assert!(post(both.address, "/v1/completions", &completion(false)).await.status >= 500);
    }
    both.settled().await;
    let lines = warnings.lines();
    let of = |engine: &str| lines.iter().filter(|line| line.contains(engine)).count();
    for engine in [d.address.to_string(), address] {
        assert!((1..=REQUESTS / 4).contains(&of(&engine)), "{engine}: {lines:#?}");
        // Lines of other events about the engine do not hold these back.
        let failed = |line: &&String| line.contains(&engine) && line.contains("event=\"attempt_failed\"");
        assert!(lines.iter().any(|line| failed(&line)), "{engine}: {lines:#?}");
    }
    let named = lines.iter().filter(|line| line.contains("engine failed a request"));
    for line in named {
        assert!(
            line.starts_with("request id=") && line.contains("reason=") && line.contains("held_back="),
            "{line}"
        );
        assert!(line.contains("event=\"attempt_failed\""), "{line}");
    }
}

//! The router's own log: repeated failures are rate-limited, and lines contain the request's id.

use std::fmt::{Debug, Write as _};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::harness::client::{completion, post};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::TestRouter;

/// Collects the router's warnings as text.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

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
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn an_engine_that_is_down_is_told_seldom_and_with_a_requests_id() {
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
    let lines = warnings.0.lock().unwrap().clone();
    let of = |engine: &str| lines.iter().filter(|line| line.contains(engine)).count();
    for engine in [d.address.to_string(), address] {
        assert!((1..=REQUESTS / 4).contains(&of(&engine)), "{engine}: {lines:#?}");
    }
    let named = lines.iter().filter(|line| line.contains("engine failed a request"));
    for line in named {
        assert!(
            line.contains("request=\"") && line.contains("reason=") && line.contains("held_back="),
            "{line}"
        );
    }
}

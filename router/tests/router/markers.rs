//! What a client says in the router's words reaches no engine, on any path that a request can take.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::client::Client;
use crate::engine::{Act, FakeEngine};
use crate::hostile::{Dice, Hostile, hostile, is_marked};
use crate::system::System;

/// Every way in which a request can go: lent and decoded, nothing lent, prefill down, prefill's reply damaged, decode
/// refusing at first, the handoff spent and computed anew.
fn paths() -> Vec<(Vec<Act>, Vec<Act>)> {
    let down = || Act::Refuse(503, json!({}));
    let spent = Act::Refuse(503, json!({"error": {"code": "kv_gone", "message": "x"}}));
    vec![
        (vec![Act::Lend(Some(1))], vec![Act::Whole(1)]),
        (vec![Act::Lend(None)], vec![Act::Stream(2)]),
        (vec![Act::Reply(Value::Null)], vec![Act::Whole(1)]),
        (vec![down()], vec![Act::Whole(1)]),
        (vec![Act::Close, Act::Lend(Some(2))], vec![Act::Whole(1)]),
        (vec![Act::Reply(json!({"do_remote_prefill": true}))], vec![Act::Whole(1)]),
        (vec![Act::Lend(Some(3))], vec![down(), Act::Whole(1)]),
        (vec![Act::Lend(Some(4))], vec![spent, Act::Whole(1)]),
    ]
}

#[tokio::test]
async fn three_thousand_hostile_bodies_over_sockets_leave_no_trace_at_any_engine() {
    let mut dice = Dice(20_261_120);
    let (mut served, mut refused) = (0, 0);
    for (p_does, d_does) in paths() {
        let p = FakeEngine::scripted(p_does).await;
        let d = FakeEngine::scripted(d_does).await;
        let other = FakeEngine::always(Act::Whole(1)).await;
        let system = System::start(&[&p], &[&d, &other]).await;
        let mut client = Client::connect(system.address).await;
        let (mut arrive, mut stay) = (Vec::new(), Vec::new());
        for _ in 0..400 {
            let Hostile { path, body, kept, refused: must } = hostile(&mut dice);
            let headers = "x-data-parallel-rank: 902109021\r\nx-baton-MARKER: 1\r\n";
            client.post_bytes(path, headers, body.as_bytes()).await;
            let answer = client.answer().await;
            assert_eq!(answer.status >= 400, must, "{body}: {}", answer.text());
            assert!(answer.status < 500, "{body}: {}", answer.text());
            if must {
                refused += 1;
                stay.extend(kept);
            } else {
                served += 1;
                arrive.extend(kept);
            }
        }
        let sent: Vec<_> =
            [p.all(), d.all(), other.all()].concat().into_iter().map(|seen| seen.raw).collect();
        let sent = String::from_utf8(sent.concat()).expect("JSON is text");
        let found: HashSet<&str> = sent.match_indices("keep").map(|(at, _)| &sent[at..at + 16]).collect();
        assert_eq!(arrive.iter().find(|text| !found.contains(text.as_str())), None, "is missing");
        assert_eq!(stay.iter().find(|text| found.contains(text.as_str())), None, "was sent");
        for seen in [p.all(), d.all(), other.all()].concat() {
            assert!(!is_marked(&seen.raw), "{}: {}", seen.path, String::from_utf8_lossy(&seen.raw));
            for (name, value) in &seen.headers {
                let line =
                    format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())).to_ascii_uppercase();
                assert!(!line.contains("MARKER") && !line.contains("902109021"), "{line}");
            }
        }
    }
    assert!(served >= 2_500 && refused > 0, "{served} were served, {refused} refused");
}

//! The protocol and its rules, on engines without faults.

use super::*;

fn plans() -> impl Iterator<Item = EnginePlan> {
    [Dialect::Baton, Dialect::Vllm].into_iter().map(|dialect| EnginePlan { dialect, ..EnginePlan::instant() })
}

/// Prompts take this long per 16 tokens, and tokens as long: there is time to disconnect.
fn slow(dialect: Dialect) -> EnginePlan {
    EnginePlan {
        dialect,
        prefill_rate: 1_600,
        decode_step: Duration::from_millis(10),
        fetch_rate: 100,
        step_tokens: 16,
        ..EnginePlan::default()
    }
}

#[tokio::test]
async fn a_prompt_has_one_text_wherever_it_is_computed() {
    for plan in plans() {
        let fleet = TestFleet::with(plan);
        for number in 0..4 {
            let ask = ask(&prompt(number, 10 + 17 * number), 40, &format!("t{number}"));
            let alone = text(&fleet.complete(Role::Decode, &ask).await);
            assert_eq!(alone.split(' ').count(), 41, "{alone}");
            let second = fleet.open_lease(&ask).await;
            assert_eq!(text(&fleet.complete(Role::Decode, &second).await), alone);
            let other = text(&fleet.complete(Role::Decode, &super::ask(&prompt(9, 10), 40, "")).await);
            assert_ne!(other, alone);
        }
        fleet.settled().await;
    }
}

#[tokio::test]
async fn the_events_of_a_handoff_are_reported_in_order() {
    for plan in plans() {
        let fleet = TestFleet::with(plan);
        let ask = ask(&prompt(1, 40), 5, "mine");
        let second = fleet.open_lease(&ask).await;
        fleet.complete(Role::Decode, &second).await;
        let first =
            ["queued", "started", "computed", "first_token", "lease_opened", "ended", "lease_ended", "freed"];
        assert_eq!(fleet.kinds(Role::Prefill, "mine"), first);
        let second =
            ["queued", "fetching", "fetched", "started", "computed", "first_token", "ended", "freed"];
        assert_eq!(fleet.kinds(Role::Decode, "mine"), second);
        let ended = fleet.event(Role::Prefill, "mine", "lease_ended").await;
        assert_eq!((&ended["reason"], &ended["blocks"]), (&json!("transfer_done"), &json!(3)));
        let started = fleet.event(Role::Decode, "mine", "started").await;
        assert_eq!(started["cached"], 39);
    }
}

#[tokio::test]
async fn a_caller_that_half_closes_before_the_reply_is_written_does_not_get_it() {
    for dialect in [Dialect::Baton, Dialect::Vllm] {
        let reply_delay = Some(PATIENCE * 2);
        let fleet = TestFleet::with(EnginePlan { dialect, reply_delay, ..EnginePlan::instant() });
        let mut caller = TestCaller::post(
            fleet.at(Role::Prefill),
            "/v1/completions",
            &first_leg(&ask(&prompt(1, 40), 5, "mine")),
        )
        .await;
        fleet.event(Role::Prefill, "mine", "lease_opened").await;
        caller.0.shutdown().await.expect("a half-close");
        let replied = fleet.event(Role::Prefill, "mine", "replied").await;
        assert_eq!(replied["result"], "dropped", "{dialect:?}");
        let mut read = Vec::new();
        caller.0.read_to_end(&mut read).await.expect("the engine closes");
        assert_eq!(read, b"", "{dialect:?}");
        match dialect {
            Dialect::Baton => fleet.settled().await,
            // This lease ends only by expiry.
            Dialect::Vllm => assert_eq!(fleet.usage(Role::Prefill).leased, 3),
        }
    }
    let reply_delay = Some(Duration::from_millis(5));
    let fleet = TestFleet::with(EnginePlan { reply_delay, ..EnginePlan::instant() });
    fleet.open_lease(&ask(&prompt(1, 40), 5, "mine")).await;
    assert_eq!(fleet.event(Role::Prefill, "mine", "replied").await["result"], "sent");
}

#[tokio::test]
async fn streams_are_the_text_in_pieces() {
    for plan in plans() {
        let fleet = TestFleet::with(EnginePlan { decode_step: Duration::from_millis(1), ..plan });
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let mut ask = json!({"model": "sim", "max_tokens": 6});
            match path {
                "/v1/completions" => ask["prompt"] = json!("one two three"),
                _ => ask["messages"] = json!([{"role": "user", "content": "one two three"}]),
            }
            let whole = fleet.post(Role::Decode, path, &ask).await.expect("an answer");
            assert_eq!(whole["usage"]["completion_tokens"], 6);
            ask["stream"] = json!(true);
            ask["stream_options"] = json!({"include_usage": true});
            let mut caller = TestCaller::post(fleet.at(Role::Decode), path, &ask).await;
            let stream = caller.reads_until("0\r\n\r\n").await;
            let mut data = stream.lines().filter_map(|line| line.strip_prefix("data: "));
            let events: Vec<Value> =
                data.clone().filter_map(|data| serde_json::from_str(data).ok()).collect();
            assert_eq!(data.next_back(), Some("[DONE]"));
            let piece = |event: &Value| {
                let choice = &event["choices"][0];
                choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default().to_owned()
            };
            let whole = &whole["choices"][0];
            let text = whole["text"].as_str().or(whole["message"]["content"].as_str()).expect("a text");
            assert_eq!(events.iter().map(piece).collect::<String>(), text);
            assert_eq!(events.last().expect("events")["usage"]["completion_tokens"], 6);
        }
    }
}

#[tokio::test]
async fn a_disconnect_from_an_engine_aborts_its_request() {
    for dialect in [Dialect::Baton, Dialect::Vllm] {
        let fleet = TestFleet::with(slow(dialect));
        for (number, how) in [HangUp::Fin, HangUp::Rst].into_iter().enumerate() {
            let (computing, decoding) = (format!("computing{number}"), format!("decoding{number}"));
            let long = first_leg(&ask(&prompt(number, 800), 9, &computing));
            let caller = TestCaller::post(fleet.at(Role::Prefill), "/v1/completions", &long).await;
            fleet.event(Role::Prefill, &computing, "computed").await;
            caller.leaves(how);
            let mut streamed = ask(&prompt(number, 10), 2_000, &decoding);
            streamed["stream"] = json!(true);
            let mut caller = TestCaller::post(fleet.at(Role::Decode), "/v1/completions", &streamed).await;
            caller.reads_until("data: ").await;
            caller.leaves(how);
            for (role, tag) in [(Role::Prefill, &computing), (Role::Decode, &decoding)] {
                assert_eq!(fleet.event(role, tag, "abort").await["how"], "disconnect");
                assert_eq!(fleet.event(role, tag, "ended").await["outcome"], "abort");
                fleet.event(role, tag, "freed").await;
            }
            let computed = fleet.event(Role::Prefill, &computing, "ended").await["computed"].clone();
            assert!(computed.as_u64().is_some_and(|tokens| tokens < 800), "{computed}");
        }
        fleet.settled().await;
    }
}

#[tokio::test]
async fn an_unread_lease_is_freed_at_its_expiry() {
    for plan in plans() {
        let fleet = TestFleet::with(EnginePlan { lease: Duration::from_millis(200), ..plan });
        fleet.open_lease(&ask(&prompt(1, 40), 5, "mine")).await;
        let ended = fleet.event(Role::Prefill, "mine", "lease_ended").await;
        assert_eq!((&ended["reason"], &ended["readers_done"]), (&json!("lease_expired"), &json!(0)));
        assert!(ended["held_us"].as_u64().is_some_and(|held| held >= 200_000), "{ended}");
        fleet.settled().await;
    }
}

#[tokio::test]
async fn batons_verbs_free_at_once_and_stock_engines_have_none() {
    for plan in plans() {
        let dialect = plan.dialect;
        let fleet = TestFleet::with(plan);
        let second = fleet.open_lease(&ask(&prompt(1, 40), 5, "mine")).await;
        let handle = second["kv_transfer_params"]["remote_handle"].clone();
        let release = json!({"handle": handle, "reason": "client_gone"});
        let released = fleet.post(Role::Prefill, "/kv/release", &release).await;
        match dialect {
            Dialect::Vllm => {
                assert_eq!(
                    released.expect_err("no such verb").status().map(|status| status.as_u16()),
                    Some(404)
                );
                assert!(handle.is_null());
            }
            Dialect::Baton => {
                assert_eq!(released.expect("a verb")["result"], "released");
                let again = fleet.post(Role::Prefill, "/kv/release", &release).await.expect("idempotent");
                assert_eq!(again["result"], "already");
                assert_eq!(fleet.event(Role::Prefill, "mine", "lease_ended").await["reason"], "client_gone");
                let service = ServiceClient::parse(&fleet.at(Role::Prefill).to_string()).expect("an address");
                let page = service.get_json("/debug/kv", PATIENCE).await.expect("a page");
                assert_eq!(page["blocks"]["free"], page["blocks"]["total"]);
                // A late consumer is refused and computes the prompt itself.
                let (late, alone) = (
                    fleet.complete(Role::Decode, &second).await,
                    fleet.complete(Role::Decode, &ask(&prompt(1, 40), 5, "")).await,
                );
                assert_eq!(text(&late), text(&alone));
                assert_eq!(fleet.event(Role::Decode, "mine", "fetched").await["result"], "gone");
            }
        }
    }
}

#[tokio::test]
async fn an_abort_by_id_covers_running_leased_and_future_requests() {
    let fleet = TestFleet::with(slow(Dialect::Baton));
    let abort = async |id: &str| {
        let body = json!({"request_ids": [id], "leg": "prefill"});
        fleet.post(Role::Prefill, "/abort_requests", &body).await.expect("a verb")["results"][id].clone()
    };
    let named = async |id: &str, words: usize| {
        let body = first_leg(&ask(&prompt(1, words), 1, id)).to_string();
        let mut stream = TcpStream::connect(fleet.at(Role::Prefill)).await.expect("it listens");
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nx-request-id: {id}\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(format!("{head}{body}").as_bytes()).await.expect("it is sent");
        TestCaller(stream)
    };
    let _lent = named("lent", 10).await;
    fleet.event(Role::Prefill, "lent", "lease_opened").await;
    assert_eq!(abort("lent").await, "released");
    assert_eq!(fleet.event(Role::Prefill, "lent", "lease_ended").await["reason"], "aborted");
    let _runs = named("runs", 800).await;
    fleet.event(Role::Prefill, "runs", "computed").await;
    abort("runs").await;
    assert_eq!(fleet.event(Role::Prefill, "runs", "abort").await["how"], "verb");
    abort("comes").await;
    let _comes = named("comes", 10).await;
    assert_eq!(fleet.event(Role::Prefill, "comes", "ended").await["outcome"], "abort");
    fleet.settled().await;
}

#[tokio::test]
async fn only_a_refusal_by_a_stock_engines_handler_ends_the_lease() {
    let fleet = TestFleet::with(EnginePlan { lease: Duration::from_secs(600), ..EnginePlan::instant() });
    let refused = async |tag: &str, field: &str, value: Value| {
        let mut second = fleet.open_lease(&ask(&prompt(1, 40), 5, tag)).await;
        second[field] = value;
        let error = fleet.post(Role::Decode, "/v1/completions", &second).await.expect_err("it is refused");
        error.status().map(|status| status.as_u16())
    };
    assert_eq!(refused("negative", "temperature", json!(-1)).await, Some(400));
    fleet.event(Role::Prefill, "negative", "freed").await;
    assert_eq!(refused("unknown", "model", json!("another")).await, Some(404));
    // A body that does not parse is refused before the handler, which knows the lease.
    assert_eq!(refused("words", "temperature", json!("abc")).await, Some(400));
    assert!(!fleet.kinds(Role::Prefill, "words").contains(&"freed".to_owned()));
    assert_eq!(fleet.usage(Role::Prefill).leased, 3);
}

#[tokio::test]
async fn a_late_read_is_wrong_on_stock_engines_and_correct_on_baton() {
    for plan in plans() {
        let dialect = plan.dialect;
        let fleet = TestFleet::with(EnginePlan { lease: Duration::from_millis(100), ..plan });
        let ask = ask(&prompt(1, 40), 20, "late");
        let right = text(&fleet.complete(Role::Decode, &ask).await);
        let second = fleet.open_lease(&ask).await;
        fleet.event(Role::Prefill, "late", "freed").await;
        // The lease's blocks are allocated again.
        fleet.open_lease(&super::ask(&prompt(2, 40), 20, "other")).await;
        let late = text(&fleet.complete(Role::Decode, &second).await);
        assert_eq!(late == right, dialect == Dialect::Baton, "{late}");
    }
}

#[tokio::test]
async fn a_full_pool_queues_requests_and_a_full_queue_refuses_them() {
    let fleet = TestFleet::with(EnginePlan { blocks: 60, waiting_max: 1, ..slow(Dialect::Baton) });
    let long = |number| ask(&prompt(number, 600), 100, &format!("n{number}"));
    let first = TestCaller::post(fleet.at(Role::Decode), "/v1/completions", &long(0)).await;
    fleet.event(Role::Decode, "n0", "started").await;
    let second = TestCaller::post(fleet.at(Role::Decode), "/v1/completions", &long(1)).await;
    fleet.event(Role::Decode, "n1", "queued").await;
    let third = fleet.post(Role::Decode, "/v1/completions", &long(2)).await.expect_err("a full queue");
    assert_eq!(third.status().map(|status| status.as_u16()), Some(429));
    assert!(!fleet.kinds(Role::Decode, "n1").contains(&"started".to_owned()));
    first.leaves(HangUp::Fin);
    fleet.event(Role::Decode, "n1", "started").await;
    second.leaves(HangUp::Fin);
    fleet.settled().await;
}

#[tokio::test]
async fn a_body_may_be_chunked_and_follow_a_100_continue() {
    let fleet = TestFleet::with(EnginePlan::instant());
    let body = ask("one two", 3, "").to_string();
    let mut stream = TcpStream::connect(fleet.at(Role::Decode)).await.expect("it listens");
    let head = "POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await.expect("it is sent");
    let mut caller = TestCaller(stream);
    caller.reads_until("100 Continue\r\n\r\n").await;
    let (one, other) = body.split_at(20);
    for piece in [one, other, ""] {
        let chunk = format!("{:x}\r\n{piece}\r\n", piece.len());
        caller.0.write_all(chunk.as_bytes()).await.expect("it is sent");
    }
    assert!(caller.reads_until("finish_reason").await.contains("200 OK"));
}

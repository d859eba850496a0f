//! SGLang engines as seen by a router: a prefill and a decode engine that share nothing but the network.

use super::super::sglang::{AbortExchange, SglangFleet, SglangPlan};
use super::*;

/// One prefill and one decode engine, each in a fleet of its own.
struct SglangPair {
    prefill: SglangFleet,
    decode: SglangFleet,
}

/// A whole response: its status and its JSON body.
struct Response {
    status: u16,
    body: Value,
}

fn plan(engine: EnginePlan) -> SglangPlan {
    SglangPlan { time_scale: 0.01, ..SglangPlan::new(FleetPlan::new(1, 1, engine)) }
}

/// Steps of 20 ms and transfers of 50 ms per page.
fn slow() -> EnginePlan {
    EnginePlan { prefill_rate: 800, step_tokens: 16, fetch_rate: 20, ..EnginePlan::default() }
}

impl SglangPair {
    fn of(plan: &SglangPlan) -> Self {
        let fleet = |prefill, decode| {
            let fleet = FleetPlan { prefill, decode, ..plan.fleet.clone() };
            SglangFleet::start(SglangPlan { fleet, ..plan.clone() }).expect("a fleet starts on loopback")
        };
        Self { prefill: fleet(1, 0), decode: fleet(0, 1) }
    }

    fn with(engine: EnginePlan) -> Self {
        Self::of(&plan(engine))
    }

    fn fleet(&self, role: Role) -> &SglangFleet {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
        }
    }

    fn at(&self, role: Role) -> SocketAddr {
        match role {
            Role::Prefill => self.prefill.prefill()[0],
            Role::Decode => self.decode.decode()[0],
        }
    }

    /// The body of both legs.
    fn body(&self, room: u64, rid: &str, words: usize, tokens: usize) -> Value {
        let mut body = ask(&prompt(room as usize, words), tokens, rid);
        body["bootstrap_host"] = json!("127.0.0.1");
        body["bootstrap_port"] = json!(self.prefill.bootstrap()[0].port());
        body["bootstrap_room"] = json!(room);
        body["rid"] = json!(rid);
        body
    }

    async fn post(&self, role: Role, path: &str, body: &Value) -> Response {
        let mut caller = TestCaller::post(self.at(role), path, body).await;
        read_response(&mut caller).await
    }

    async fn both(&self, path: &str, body: &Value) -> [Response; 2] {
        let (prefill, decode) =
            tokio::join!(self.post(Role::Prefill, path, body), self.post(Role::Decode, path, body));
        [prefill, decode]
    }

    async fn get(&self, role: Role, path: &str) -> Value {
        let service = ServiceClient::parse(&self.at(role).to_string()).expect("an address");
        service.get_json(path, PATIENCE).await.expect("a page")
    }

    async fn abort(&self, role: Role, body: &Value) {
        let service = ServiceClient::parse(&self.at(role).to_string()).expect("an address");
        service.post_json("/abort_request", body, PATIENCE).await.expect("always 200");
    }

    fn events(&self, role: Role, tag: &str) -> Vec<Value> {
        let log = self.fleet(role).log(role, 0).expect("it lives");
        log.page(0, usize::MAX).events.into_iter().filter(|event| event["tag"] == tag).collect()
    }

    fn kinds(&self, role: Role, tag: &str) -> Vec<String> {
        let kind = |event: &Value| event["kind"].as_str().expect("a kind").to_owned();
        self.events(role, tag).iter().map(kind).collect()
    }

    async fn event(&self, role: Role, tag: &str, kind: &str) -> Value {
        eventually(kind, || self.events(role, tag).into_iter().find(|event| event["kind"] == kind)).await
    }

    /// Waits until no engine has a request or a page.
    async fn settled(&self) {
        for role in [Role::Prefill, Role::Decode] {
            let idle = async {
                loop {
                    let page = self.get(role, "/debug/kv").await;
                    let requests = page["requests"].as_object().expect("requests");
                    let busy: u64 = requests.values().filter_map(Value::as_u64).sum();
                    if busy == 0 && page["blocks"]["free"] == page["blocks"]["total"] {
                        return;
                    }
                }
            };
            tokio::time::timeout(PATIENCE, idle).await.unwrap_or_else(|_| panic!("{role:?} never settles"));
        }
    }
}

async fn read_response(caller: &mut TestCaller) -> Response {
    let head = caller.reads_until("\r\n\r\n").await;
    let (head, read) = head.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("in one piece");
    let (mut body, length) = (read.as_bytes().to_vec(), length.parse::<usize>().expect("a length"));
    let reads = async {
        while body.len() < length {
            assert!(caller.0.read_buf(&mut body).await.expect("it is read") > 0, "ended");
        }
    };
    tokio::time::timeout(PATIENCE, reads).await.expect("the whole body");
    Response { status, body: serde_json::from_slice(&body).unwrap_or_default() }
}

#[tokio::test]
async fn a_pair_responds_with_the_text_of_one_engine_and_ps_first_token() {
    let (pair, alone) = (SglangPair::with(EnginePlan::instant()), TestFleet::with(EnginePlan::instant()));
    for room in 1..4 {
        let expected = text(&alone.complete(Role::Decode, &ask(&prompt(room, 40), 12, "")).await);
        let tag = format!("r{room}");
        let [prefill, decode] = pair.both("/v1/completions", &pair.body(room as u64, &tag, 40, 12)).await;
        assert_eq!((prefill.status, decode.status), (200, 200));
        assert_eq!(prefill.body["choices"][0]["finish_reason"], "length");
        assert_eq!(prefill.body["usage"]["completion_tokens"], 1);
        assert_eq!(text(&decode.body), expected);
        assert!(expected.starts_with(&text(&prefill.body)));
        let first =
            ["queued", "started", "computed", "first_token", "lease_opened", "ended", "lease_ended", "freed"];
        assert_eq!(pair.kinds(Role::Prefill, &tag), first);
        let second = ["queued", "fetching", "fetched", "started", "first_token", "ended", "freed"];
        assert_eq!(pair.kinds(Role::Decode, &tag), second);
    }
    pair.settled().await;
}

#[tokio::test]
async fn every_path_pairs_legs_and_streams_the_same_text() {
    let pair = SglangPair::with(EnginePlan::instant());
    let content = |data: &Value| {
        let choice = &data["choices"][0];
        choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default().to_owned()
    };
    let mut room = 0;
    for path in ["/v1/completions", "/v1/chat/completions", "/generate"] {
        let mut body = pair.body(1, "x", 20, 6);
        body["messages"] = json!([{"role": "user", "content": body["prompt"]}]);
        body["text"] = body["prompt"].clone();
        body["sampling_params"] = json!({"max_new_tokens": 6});
        let mut next = |stream: bool| {
            room += 1;
            let mut body = body.clone();
            (body["bootstrap_room"], body["rid"], body["stream"]) =
                (json!(room), json!(format!("x{room}")), json!(stream));
            body
        };
        let whole = &pair.both(path, &next(false)).await[1].body;
        let whole = whole["text"]
            .as_str()
            .or(whole["choices"][0]["text"].as_str())
            .map(str::to_owned)
            .or_else(|| whole["choices"][0]["message"]["content"].as_str().map(str::to_owned));
        let body = next(true);
        let mut prefill = TestCaller::post(pair.at(Role::Prefill), path, &body).await;
        let mut decode = TestCaller::post(pair.at(Role::Decode), path, &body).await;
        let stream = decode.reads_until("data: [DONE]\n\n\r\n0\r\n\r\n").await;
        assert!(prefill.reads_until("data: [DONE]\n\n\r\n0\r\n\r\n").await.starts_with("HTTP/1.1 200"));
        let events: Vec<Value> = stream
            .lines()
            .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
            .collect();
        let streamed = match path {
            "/generate" => events.last().expect("events")["text"].as_str().expect("a text").to_owned(),
            _ => events.iter().map(content).collect(),
        };
        assert_eq!(Some(streamed), whole, "{path}");
    }
    pair.settled().await;
}

#[tokio::test]
async fn a_missing_room_is_refused_on_both_legs() {
    let pair = SglangPair::with(EnginePlan::instant());
    let mut body = pair.body(1, "x", 10, 3);
    body.as_object_mut().expect("an object").remove("bootstrap_room");
    let text = "Disaggregated request received without bootstrap room id. req.rid='x'";
    for response in pair.both("/v1/completions", &body).await {
        assert_eq!(response.status, 400);
        assert!(response.body["message"].as_str().expect("a message").contains(text), "{}", response.body);
    }
    body["stream"] = json!(true);
    let mut caller = TestCaller::post(pair.at(Role::Decode), "/v1/completions", &body).await;
    let stream = caller.reads_until("[DONE]").await;
    assert!(stream.starts_with("HTTP/1.1 200") && stream.contains(text), "{stream}");
}

#[tokio::test]
async fn a_rid_in_use_and_two_choices_are_refused() {
    let pair = SglangPair::with(slow());
    let body = pair.body(1, "x", 10, 3);
    let _first = TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &body).await;
    pair.event(Role::Prefill, "x", "queued").await;
    let again = pair.post(Role::Prefill, "/v1/completions", &body).await;
    assert_eq!((again.status, &again.body["message"]), (400, &json!("Duplicate request ID detected: x")));
    let mut body = pair.body(2, "n", 10, 3);
    body["n"] = json!(2);
    for response in pair.both("/v1/completions", &body).await {
        let message = response.body["message"].as_str().expect("a message");
        assert_eq!(response.status, 500);
        assert!(message.contains("Duplicate or cancelled bootstrap room"), "{message}");
    }
}

#[tokio::test]
async fn an_abort_of_p_is_an_error_of_d_with_a_status_or_inside_the_stream() {
    let pair = SglangPair::with(slow());
    for stream in [false, true] {
        let rid = if stream { "streamed" } else { "whole" };
        let mut body = pair.body(1 + u64::from(stream), rid, 40, 9);
        body["stream"] = json!(stream);
        let mut prefill = TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &body).await;
        let mut decode = TestCaller::post(pair.at(Role::Decode), "/v1/completions", &body).await;
        pair.event(Role::Prefill, rid, "lease_opened").await;
        // An unknown name, and a prefix that is no name in flight, abort nothing.
        for ignored in [json!({"rid": "w"}), json!({"rid": ""}), json!({})] {
            pair.abort(Role::Prefill, &ignored).await;
        }
        pair.abort(Role::Prefill, &json!({"rid": rid})).await;
        let (of_p, of_d) = ("Prefill transfer failed", "Decode transfer failed");
        if stream {
            for (caller, text) in [(&mut prefill, of_p), (&mut decode, of_d)] {
                let read = caller.reads_until("[DONE]").await;
                assert!(read.starts_with("HTTP/1.1 200") && read.contains("data: {\"error\":"), "{read}");
                assert!(read.contains(text) && read.contains("INTERNAL_SERVER_ERROR"), "{read}");
            }
        } else {
            for (caller, text) in [(&mut prefill, of_p), (&mut decode, of_d)] {
                let Response { status, body } = read_response(caller).await;
                assert!(
                    status == 500 && body["message"].as_str().expect("a message").contains(text),
                    "{body}"
                );
            }
        }
        assert_eq!(pair.event(Role::Decode, rid, "abort").await["how"], "peer");
    }
    pair.settled().await;
}

#[tokio::test]
async fn an_abort_covers_names_that_begin_with_its_own() {
    let pair = SglangPair::with(slow());
    let mut callers = Vec::new();
    for (room, rid) in [(1, "a"), (2, "a1"), (3, "b")] {
        let body = pair.body(room, rid, 10, 3);
        callers.push(TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &body).await);
        pair.event(Role::Prefill, rid, "queued").await;
    }
    pair.abort(Role::Prefill, &json!({"rid": "a"})).await;
    pair.event(Role::Prefill, "a1", "abort").await;
    assert!(!pair.kinds(Role::Prefill, "b").contains(&"abort".to_owned()));
    pair.abort(Role::Prefill, &json!({"abort_all": true})).await;
    pair.event(Role::Prefill, "b", "abort").await;
    pair.settled().await;
}

#[tokio::test]
async fn a_disconnect_is_found_after_the_servers_wait() {
    let pair = SglangPair::with(EnginePlan { decode_step: Duration::from_millis(5), ..slow() });
    let mut room = 0;
    for (stream, wait_us) in [(false, 0), (true, 20_000)] {
        for how in [HangUp::Fin, HangUp::Rst] {
            room += 1;
            let rid = format!("x{room}");
            let mut body = pair.body(room, &rid, 10, 2_000);
            body["stream"] = json!(stream);
            let _prefill = TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &body).await;
            let mut caller = TestCaller::post(pair.at(Role::Decode), "/v1/completions", &body).await;
            if stream {
                caller.reads_until("data: ").await;
            } else {
                pair.event(Role::Decode, &rid, "first_token").await;
            }
            let left_us = pair.decode.log(Role::Decode, 0).expect("it lives").now_us();
            caller.leaves(how);
            let abort = pair.event(Role::Decode, &rid, "abort").await;
            assert_eq!(abort["how"], "disconnect");
            assert!(abort["at_us"].as_u64().expect("a time") >= left_us + wait_us, "{abort}");
            if !stream {
                // At a multiple of 40 ms after its arrival.
                let queued =
                    pair.event(Role::Decode, &rid, "queued").await["at_us"].as_u64().expect("a time");
                assert!(abort["at_us"].as_u64().expect("a time") >= queued + 39_000);
            }
        }
    }
    pair.settled().await;
}

#[tokio::test]
async fn without_an_exchange_of_aborts_d_waits_for_its_timeout() {
    let pair = SglangPair::of(&SglangPlan { aborts: AbortExchange::Old, time_scale: 0.002, ..plan(slow()) });
    let body = pair.body(1, "x", 10, 3);
    let decode = pair.post(Role::Decode, "/v1/completions", &body);
    let abort = async {
        let prefill = TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &body).await;
        pair.event(Role::Prefill, "x", "started").await;
        pair.abort(Role::Prefill, &json!({"rid": "x"})).await;
        pair.event(Role::Prefill, "x", "freed").await;
        drop(prefill);
    };
    let (Response { status, body }, ()) = tokio::join!(decode, abort);
    let message = body["message"].as_str().expect("a message");
    assert!(status == 500 && message.contains("in KVPoll.WaitingForInput"), "{message}");
    pair.settled().await;
}

#[tokio::test]
async fn a_dead_prefill_engine_is_found_by_heartbeats_and_a_restarted_one_serves() {
    let pair = SglangPair::with(EnginePlan::instant());
    let waits = pair.body(1, "waits", 10, 3);
    let decode = pair.post(Role::Decode, "/v1/completions", &waits);
    let kill = async {
        pair.event(Role::Decode, "waits", "fetching").await;
        pair.prefill.kill(Role::Prefill, 0).expect("it is there");
    };
    let (Response { status, body }, ()) = tokio::join!(decode, kill);
    let message = body["message"].as_str().expect("a message");
    assert!(status == 500 && message.contains("Losing connection with prefill instance"), "{message}");
    pair.prefill.restart(Role::Prefill, 0).expect("its ports are free");
    for response in pair.both("/v1/completions", &pair.body(2, "again", 10, 3)).await {
        assert_eq!(response.status, 200);
    }
    // A restart between two heartbeats is found by a message that no engine receives.
    pair.prefill.restart(Role::Prefill, 0).expect("its ports are free");
    let retried = async {
        for room in 3.. {
            let body = pair.body(room, &format!("after{room}"), 10, 3);
            let prefill = TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &body).await;
            let decode = pair.post(Role::Decode, "/v1/completions", &body).await;
            drop(prefill);
            if decode.status == 200 {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, retried).await.expect("a pair with a fresh room");
    pair.settled().await;
}

#[tokio::test]
async fn ranks_follow_the_room_and_contradictions_fail() {
    let pair = SglangPair::of(&SglangPlan { ranks: 2, ..plan(EnginePlan::instant()) });
    for room in [2, 3] {
        let rid = format!("x{room}");
        let mut body = pair.body(room, &rid, 10, 3);
        body["routed_dp_rank"] = json!(1);
        let mut of_p = body.clone();
        of_p["routed_dp_rank"] = json!(room % 2);
        let (decode, prefill) = tokio::join!(
            pair.post(Role::Decode, "/v1/completions", &body),
            pair.post(Role::Prefill, "/v1/completions", &of_p)
        );
        assert_eq!((prefill.status, decode.status), (200, 200));
        assert_eq!(pair.event(Role::Prefill, &rid, "queued").await["rank"], room % 2);
        assert_eq!(pair.event(Role::Decode, &rid, "queued").await["rank"], 1);
    }
    let mut body = pair.body(4, "conflict", 10, 3);
    body["routed_dp_rank"] = json!(1);
    let conflict = pair.post(Role::Prefill, "/v1/completions", &body).await;
    let message = conflict.body["message"].as_str().expect("a message");
    assert!(conflict.status == 500 && message.contains("follow_bootstrap_room conflict"), "{message}");
    body["routed_dp_rank"] = json!(2);
    let none = pair.post(Role::Prefill, "/v1/completions", &body).await;
    assert_eq!((none.status, &none.body["message"]), (400, &json!("DP rank 2 is not active")));
    let cores = pair.get(Role::Decode, "/debug/kv").await["cores"].as_array().map(Vec::len);
    assert_eq!(cores, Some(2));
    pair.settled().await;
}

#[tokio::test]
async fn pages_show_what_a_router_asks_for() {
    let pair = SglangPair::with(EnginePlan::instant());
    let info = pair.get(Role::Prefill, "/server_info").await;
    assert_eq!((&info["disaggregation_mode"], &info["page_size"]), (&json!("prefill"), &json!(16)));
    assert_eq!(info["disaggregation_bootstrap_port"], pair.prefill.bootstrap()[0].port());
    assert_eq!(info["load_balance_method"], "follow_bootstrap_room");
    let of_d = pair.get(Role::Decode, "/server_info").await;
    assert_eq!((&of_d["disaggregation_mode"], &of_d["dp_size"]), (&json!("decode"), &json!(1)));
    assert_eq!(pair.get(Role::Decode, "/model_info").await["disaggregation_mode"], "decode");
    assert_eq!(pair.get(Role::Decode, "/v1/models").await["data"][0]["owned_by"], "sglang");
    let service = ServiceClient::parse(&pair.at(Role::Prefill).to_string()).expect("an address");
    for path in ["/ready", "/ping"] {
        assert!(service.get(path, PATIENCE).await.expect("at once").is_empty());
    }
    let began = std::time::Instant::now();
    service.get("/health", PATIENCE).await.expect("it is healthy");
    assert!(began.elapsed() >= Duration::from_millis(10), "it generates a token");
    let samples = service.samples(PATIENCE).await.expect("metrics");
    assert_eq!(samples.sum("sglang:generation_tokens_total", &[]), Some(1.0));
    assert_eq!(samples.sum("sglang:num_prefill_bootstrap_queue_reqs", &[]), Some(0.0));
    // A leg that waits for its peer is in a queue of its own.
    let _waits = TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &pair.body(1, "x", 9, 3)).await;
    pair.event(Role::Prefill, "x", "queued").await;
    let loads = pair.get(Role::Prefill, "/v1/loads?include=core,disagg").await;
    let load = &loads["loads"][0];
    assert_eq!((&load["dp_rank"], &load["num_waiting_reqs"]), (&json!(0), &json!(1)), "{load}");
    assert_eq!(load["disaggregation"]["prefill_bootstrap_queue_reqs"], 1);
    assert!(load["queues"].is_null());
    let text = service.get("/v1/loads?format=prometheus", PATIENCE).await.expect("a page");
    assert!(String::from_utf8_lossy(&text).contains("sglang_num_waiting_reqs{dp_rank=\"0\"} 1"), "{text:?}");
    let refused = service.get("/v1/loads?include=nothing", PATIENCE).await.expect_err("no such section");
    assert_eq!(refused.status().map(|status| status.as_u16()), Some(400));
    let bootstrap = ServiceClient::parse(&pair.prefill.bootstrap()[0].to_string()).expect("an address");
    let route = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    let topology = bootstrap.get_json(route, PATIENCE).await.expect("a topology");
    assert_eq!((&topology["dp_size"], &topology["follow_bootstrap_room"]), (&json!(1), &json!(true)));
    assert!(
        bootstrap.get("/route", PATIENCE).await.is_err() && bootstrap.get("/health", PATIENCE).await.is_ok()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_storm_of_aborted_pairs_every_page_is_free_and_every_text_is_correct() {
    let engine =
        EnginePlan { prefill_rate: 20_000, decode_step: Duration::from_millis(1), blocks: 400, ..slow() };
    let engine = EnginePlan { fetch_rate: 1_000, step_tokens: 2_048, ..engine };
    let pair = Arc::new(SglangPair::with(engine));
    let alone = TestFleet::with(EnginePlan::instant());
    let right = text(&alone.complete(Role::Decode, &ask(&prompt(0, 60), 24, "")).await);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..60u64 {
        let (pair, right) = (Arc::clone(&pair), right.clone());
        tasks.spawn(async move {
            let rid = format!("r{number:02}");
            let mut body = pair.body(number + 1, &rid, 60, 24);
            body["prompt"] = json!(prompt(0, 60));
            if number % 2 == 0 {
                let [prefill, decode] = pair.both("/v1/completions", &body).await;
                assert_eq!((prefill.status, text(&decode.body)), (200, right));
                return;
            }
            body["stream"] = json!(true);
            let prefill = TestCaller::post(pair.at(Role::Prefill), "/v1/completions", &body).await;
            let mut decode = TestCaller::post(pair.at(Role::Decode), "/v1/completions", &body).await;
            match number % 8 {
                1 => drop(pair.event(Role::Prefill, &rid, "queued").await),
                3 => drop(pair.event(Role::Prefill, &rid, "started").await),
                5 => drop(pair.event(Role::Prefill, &rid, "lease_opened").await),
                _ => drop(decode.reads_until("data: ").await),
            }
            // As a router does on every end.
            for role in [Role::Prefill, Role::Decode] {
                pair.abort(role, &json!({"rid": rid})).await;
            }
            prefill.leaves(HangUp::Fin);
            decode.leaves(HangUp::Rst);
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no thread panics");
    }
    pair.settled().await;
}

//! The allocations of the router for one request of two legs. With system calls they are most of its cost.

#[path = "../../connector/openai/tests/counting/mod.rs"]
mod counting;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use baton_router::{Router, RouterConfig};
use counting::allocations;
use tokio_util::sync::CancellationToken;

/// Requests before those that are counted: connections and tables have their size then.
const FIRST: usize = 50;
const COUNTED: usize = 200;
/// Most allocations of one request. The simulated engines and the client have threads of their own, which do not count.
const MOST: usize = 100;

static PREFILLS: AtomicUsize = AtomicUsize::new(0);

const HANDOFF: &str = r#"{"id":"p","choices":[{"text":"","finish_reason":"length"}],"kv_transfer_params":{
    "do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"p",
    "remote_request_id":"cmpl-1","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":20,
    "remote_handle":"00000000000000000000000000000007"}}"#;
const RESPONSE: &str = r#"{"id":"d","choices":[{"index":0,"text":" hi","finish_reason":"length"}],
    "usage":{"prompt_tokens":20,"completion_tokens":1,"total_tokens":21}}"#;

/// One message of HTTP/1.1: its first line and its body. `None` at the end of the connection.
fn message(from: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut first = String::new();
    if from.read_line(&mut first).ok()? == 0 {
        return None;
    }
    let mut length = 0;
    loop {
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(bytes) = line.strip_prefix("content-length: ") {
            length = bytes.parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body).ok()?;
    Some((first, body))
}

/// An engine that gives every generating request this reply.
fn engine(reply: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || serve(stream, reply));
        }
    });
    address
}

fn serve(mut stream: TcpStream, reply: &str) -> Option<()> {
    let mut requests = BufReader::new(stream.try_clone().ok()?);
    while let Some((first, _)) = message(&mut requests) {
        let (status, body) = match first.starts_with("POST /v1/completions ") {
            true => ("200 OK", reply),
            false if first.starts_with("GET /server_info ") => ("404 Not Found", "{}"),
            false => ("200 OK", "{}"),
        };
        if body == HANDOFF {
            PREFILLS.fetch_add(1, Ordering::Relaxed);
        }
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes()).ok()?;
    }
    None
}

/// Sends requests by one connection.
fn send(router: SocketAddr, requests: usize) {
    let mut stream = TcpStream::connect(router).expect("the router listens");
    let mut replies = BufReader::new(stream.try_clone().expect("a second handle"));
    let body = format!(r#"{{"model":"m","prompt":"{}","max_tokens":1}}"#, "a long prompt ".repeat(200));
    let length = body.len();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    let request = head + &body;
    for _ in 0..requests {
        stream.write_all(request.as_bytes()).expect("the connection is open");
        let (status, body) = message(&mut replies).expect("a reply");
        let body = String::from_utf8_lossy(&body);
        assert!(status.contains(" 200 ") && body.contains(" hi"), "{status}{body}");
    }
}

/// The allocations of a router, from its start to its end, that serves this many requests.
fn serving(requests: usize) -> usize {
    let (prefill, decode) = (engine(HANDOFF), engine(RESPONSE));
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nmodels: [{{name: m, prefill: {{engines: [{{url: \
         'http://{prefill}'}}]}}, decode: {{engines: [{{url: 'http://{decode}'}}]}}}}]\n"
    );
    let run = || {
        let config = RouterConfig::from_yaml(&yaml, "test.yaml").expect("a configuration");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let router = Router::bind(config).await.expect("free ports");
            let (address, shutdown) = (router.local_addr(), CancellationToken::new());
            let client = thread::spawn({
                // Whatever happens to the client, the router ends.
                let ends = shutdown.clone().drop_guard();
                move || {
                    let _ends = ends;
                    send(address, requests);
                }
            });
            router.run(shutdown).await;
            client.join().expect("every request succeeded");
        });
    };
    let ((), made) = allocations(run);
    assert_eq!(PREFILLS.swap(0, Ordering::Relaxed), requests, "each request has both legs");
    made
}

#[test]
fn a_request_of_two_legs_needs_a_bounded_number_of_allocations() {
    let made = (serving(FIRST + COUNTED) - serving(FIRST)) / COUNTED;
    eprintln!("{made} allocations per request");
    assert!(made <= MOST, "{made} allocations per request");
}

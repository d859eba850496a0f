//! Many clients at once on small pools. A third of them disconnect, each at another point. The others get the same
//! response as without load, and afterwards every block is free.

use baton_connector_tcp::ClientOptions;

use crate::harness::{AT_ONCE, Cluster, GenerateRequest, HangUp, PATIENCE, eventually};

/// Clients of each kind.
const CLIENTS: usize = 60;

#[test]
fn a_storm_serves_uncancelled_requests_and_frees_every_block() {
    // 96 blocks are 1,536 tokens, 40 are 640: only a fraction of the requests fits at once.
    let cluster = Cluster::new()
        .prefill("--kv-blocks 96 --max-num-batched-tokens 256 --max-num-seqs 16 --pace-ms 2")
        .decode("--kv-blocks 40 --max-num-seqs 16 --pace-ms 2")
        .start();
    let questions: Vec<GenerateRequest> = (0..4).map(|kind| GenerateRequest::recall(20 + 7 * kind)).collect();
    let alone: Vec<String> = questions.iter().map(|ask| cluster.ask(ask).text()).collect();
    cluster.settled(AT_ONCE);
    let calm = cluster.descriptors();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (cluster, questions, alone) = (&cluster, &questions, &alone);
            scope.spawn(move || {
                let how = HangUp::BOTH[client % 2];
                match client % 6 {
                    // Does not disconnect.
                    0 | 2 | 3 | 5 => {
                        let kind = client % questions.len();
                        assert_eq!(cluster.ask(&questions[kind]).text(), alone[kind], "client {client}");
                    }
                    // Disconnects after some events of the stream.
                    1 => {
                        let ask = GenerateRequest::fresh(50 + client).tokens(200).streamed();
                        let mut stream = cluster.send(&ask).stream();
                        for _ in 0..client % 8 {
                            stream.event().expect("an event");
                        }
                        stream.hang_up(how);
                    }
                    // Disconnects without reading.
                    _ => cluster.send(&GenerateRequest::fresh(50 + 4 * client).tokens(200)).hang_up(how),
                }
            });
        }
    });
    cluster.settled(AT_ONCE);
    let left = cluster.router_metric("baton_router_disconnects_total", "");
    println!("{left} of {CLIENTS} clients left");
    assert!(left >= 15.0, "most of those who left were to be noticed, not served: {left}");
    let preempted = cluster.decode[0].metric("vllm:num_preemptions_total", "");
    println!("{preempted} preemptions at the decode engine");
    // The router keeps idle connections for some seconds. The decode engine keeps a bounded number for longer. No other
    // descriptor may remain.
    let kept = ClientOptions::default().connections_per_peer_max;
    let bound: Vec<usize> =
        calm.iter().enumerate().map(|(at, calm)| calm + kept * usize::from(at > 0)).collect();
    let closed = || {
        let open = cluster.descriptors();
        let left = open.iter().zip(&bound).any(|(open, bound)| open > bound);
        if left { Err(format!("{open:?} descriptors are open, {bound:?} may be")) } else { Ok(()) }
    };
    eventually(PATIENCE, "every descriptor is closed", closed);
    cluster.still_serves();
}

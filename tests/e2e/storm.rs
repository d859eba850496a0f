//! Many clients at once over small pools, every third of which leaves at a point that differs from client to
//! client. Those who stay get the answer that they would have got alone; afterwards every block is back.

use crate::harness::{AT_ONCE, Ask, Cluster, HangUp, PATIENCE};

/// Clients of one kind each.
const CLIENTS: usize = 60;

#[test]
fn in_a_storm_of_hang_ups_those_who_stay_are_served_and_every_block_comes_back() {
    // 96 blocks are 1,536 tokens, 40 are 640: a fraction of what the clients ask for fits at once.
    let cluster = Cluster::new()
        .prefill("--kv-blocks 96 --max-num-batched-tokens 256 --max-num-seqs 16 --pace-ms 2")
        .decode("--kv-blocks 40 --max-num-seqs 16 --pace-ms 2")
        .start();
    let questions: Vec<Ask> = (0..4).map(|kind| Ask::recall(20 + 7 * kind)).collect();
    let alone: Vec<String> = questions.iter().map(|ask| cluster.ask(ask).text()).collect();
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (cluster, questions, alone) = (&cluster, &questions, &alone);
            scope.spawn(move || {
                let how = HangUp::BOTH[client % 2];
                match client % 6 {
                    // Stays.
                    0 | 2 | 3 | 5 => {
                        let kind = client % questions.len();
                        assert_eq!(cluster.ask(&questions[kind]).text(), alone[kind], "client {client}");
                    }
                    // Leaves the stream after some events.
                    1 => {
                        let ask = Ask::fresh(50 + client).tokens(200).streamed();
                        let mut stream = cluster.send(&ask).stream();
                        for _ in 0..client % 8 {
                            stream.event().expect("an event");
                        }
                        stream.hang_up(how);
                    }
                    // Leaves without having read anything.
                    _ => cluster.send(&Ask::fresh(50 + 4 * client).tokens(200)).hang_up(how),
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
    cluster.settled(PATIENCE);
    cluster.still_serves();
}

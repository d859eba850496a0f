//! Blocks compared byte for byte: `GET /debug/kv/digests`.

use std::collections::BTreeMap;

use baton_connector::BlockId;
use baton_engine::blocks::hash;
use baton_engine::run::options::Role;

use crate::harness::cluster::{BLOCK, Cluster, LLAMA, Node, greedy, options, prompt};
use crate::harness::http;

/// The cached blocks of an engine: chained hash → (block id, digest).
pub(crate) fn digests(node: &Node) -> BTreeMap<String, (u32, String)> {
    digests_of_rank(node, 0)
}

/// The cached blocks of one of its data-parallel ranks.
pub(crate) fn digests_of_rank(node: &Node, rank: usize) -> BTreeMap<String, (u32, String)> {
    let mut all = BTreeMap::new();
    let mut after = String::new();
    loop {
        let page = node.get(&format!("/debug/kv/digests?rank={rank}{after}")).ok();
        for block in page["blocks"].as_array().expect("blocks") {
            let text = |field: &str| block[field].as_str().expect("text").to_owned();
            let id = block["block"].as_u64().expect("an id") as u32;
            assert!(all.insert(text("hash"), (id, text("sha256"))).is_none(), "a hash is shown once");
        }
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => return all,
        }
    }
}

/// Chained hashes of the full blocks of a sequence.
pub(crate) fn hashes(prompt: &[u32]) -> Vec<String> {
    hashes_by(None, prompt)
}

/// As [`hashes`], with the adapter of this digest.
pub(crate) fn hashes_by(adapter: Option<&[u8; 32]>, prompt: &[u32]) -> Vec<String> {
    let mut hashes = Vec::new();
    hash::extend_with(&mut hashes, prompt, BLOCK, None, adapter);
    hashes.iter().map(ToString::to_string).collect()
}

/// The positions of a prompt's full blocks that differ between two engines. All must be cached on both.
#[track_caller]
fn differing(a: &Node, b: &Node, prompt: &[u32]) -> Vec<usize> {
    let (on_a, on_b) = (digests(a), digests(b));
    let places = hashes(prompt).into_iter().enumerate();
    places.filter(|(_, hash)| on_a[hash].1 != on_b[hash].1).map(|(place, _)| place).collect()
}

/// All full blocks of a prompt hold the same bytes on both engines.
#[track_caller]
pub(crate) fn same_bytes(a: &Node, b: &Node, prompt: &[u32]) {
    assert_eq!(differing(a, b, prompt), [0; 0], "blocks that differ, of {}", prompt.len() / BLOCK);
}

#[test]
fn exactly_the_two_swapped_blocks_are_reported() {
    let cluster = Cluster::of(LLAMA);
    let prompt = prompt(9, 6 * BLOCK + 3);
    cluster.agrees(&greedy(&prompt, 4));
    same_bytes(&cluster.p, &cluster.d, &prompt);

    let (names, held) = (hashes(&prompt), digests(&cluster.d));
    let block = |place: usize| BlockId(held[&names[place]].0);
    let (second, fifth) = (cluster.d.memory().read_block(block(1)), cluster.d.memory().read_block(block(4)));
    assert_ne!(second, fifth);
    cluster.d.memory().write_block(block(1), &fifth);
    cluster.d.memory().write_block(block(4), &second);
    assert_eq!(differing(&cluster.p, &cluster.d, &prompt), [1, 4]);

    // One bit is enough.
    cluster.d.memory().write_block(block(1), &second);
    cluster.d.memory().write_block(block(4), &fifth);
    same_bytes(&cluster.p, &cluster.d, &prompt);
    let mut bytes = cluster.d.memory().read_block(block(5));
    *bytes.last_mut().expect("a block has bytes") ^= 1;
    cluster.d.memory().write_block(block(5), &bytes);
    assert_eq!(differing(&cluster.p, &cluster.d, &prompt), [5]);
    cluster.is_clean();
}

#[test]
fn digests_are_shown_from_any_hash_on() {
    let cluster = Cluster::of(LLAMA);
    let prompt = prompt(10, 5 * BLOCK);
    cluster.one.generate("a", &greedy(&prompt, 1)).ok();
    let all: Vec<String> = digests(&cluster.one).into_keys().collect();
    assert_eq!(all.len(), 5);
    let page = cluster.one.get(&format!("/debug/kv/digests?after={}", all[2])).ok();
    let shown: Vec<&str> = page["blocks"]
        .as_array()
        .expect("blocks")
        .iter()
        .map(|b| b["hash"].as_str().expect("text"))
        .collect();
    assert_eq!(shown, [&all[3], &all[4]]);
    assert_eq!(cluster.one.get("/debug/kv/digests?after=12").status, 400);
    assert_eq!(cluster.one.post("/debug/kv/digests", &serde_json::json!({})).status, 405);
}

#[test]
fn digests_are_for_the_cluster_only() {
    let mut options = options(LLAMA, Role::Both);
    options.cluster_secret = Some("a secret of the cluster".into());
    let node = Node::start(options);
    assert_eq!(node.get("/debug/kv/digests").status, 401);
    let shown = [("x-baton-cluster-secret", "a secret of the cluster")];
    assert_eq!(http::call(node.http, "GET", "/debug/kv/digests", &shown, "").status, 200);
}

//! Every bound of the contract in one place, with the arithmetic that ties them together.

use std::time::Duration;

/// Longest request id, in bytes. A UUID is 36; vLLM's prefixes and suffixes add about 20.
pub const REQUEST_ID_MAX_BYTES: usize = 128;

/// How long a lease lives without a heartbeat. Name and default of vLLM's `kv_lease_duration`.
pub const KV_LEASE_DURATION: Duration = Duration::from_secs(30);

/// What one heartbeat adds, as a fraction of the lease duration: two thirds, as in vLLM (PR #41383).
pub const HEARTBEAT_EXTENSION: (u32, u32) = (2, 3);

/// Heartbeats of a consumer per lease duration. A lease survives four lost heartbeats in a row.
pub const HEARTBEATS_PER_LEASE: u32 = 6;

/// A consumer renews a lease that it has not begun to read for at most this many lease durations. Then it abandons the
/// handoff. With the default duration that is vLLM's `decoder_kv_blocks_ttl`, 480 s. Without a bound, two engines that
/// serve both legs could wait for each other's leased blocks and renew forever.
pub const RENEWAL_DURATIONS_MAX: u32 = 16;

/// Longest wait of a consumer for blocks that are still computed: as long as for a handoff that it has not begun to
/// read.
pub const GROWING_MAX: Duration =
    Duration::from_secs(KV_LEASE_DURATION.as_secs() * RENEWAL_DURATIONS_MAX as u64);

/// How long a released or expired lease waits for readers in flight. Then its blocks are freed, and such a reader is
/// answered "gone" and never uses what it read.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// Shards of one engine's KV cache. Models of 2026 have at most 64 KV heads, and a shard has at least one.
pub const RANKS_MAX: usize = 64;

/// Tokens of one block.
pub const BLOCK_TOKENS_MAX: usize = 1_024;

/// Links of one consumer to one producer: the borders of 64 ranks and of 64 other ranks cut the heads into at most 127
/// pieces.
pub const LINKS_MAX: usize = 2 * RANKS_MAX - 1;

/// Consumers of one handoff: `n` up to 16, spread over as many decode engines.
pub const CONSUMERS_MAX: usize = 16;

/// Readers (consumer, link) that one lease records, in flight and done.
pub const READERS_MAX: usize = 2_048;

/// Live leases of one producer. The ledger then takes at most about 64 MiB. Renewing all of them
/// [`HEARTBEATS_PER_LEASE`] times per lease duration takes about a hundredth of a core (`baton bench lease`).
pub const LEASES_MAX: usize = 131_072;

/// Ended leases and early releases that a producer remembers, so that late messages get an exact answer.
pub const TOMBSTONES_MAX: usize = 16_384;

/// How long a tombstone is kept: longer than any handoff is of use (a lease, its drain, and a minute).
pub const TOMBSTONE_TTL: Duration = Duration::from_secs(120);

/// Blocks in one handoff. 65,536 blocks of 16 tokens are a context of a million tokens.
pub const BLOCKS_PER_HANDOFF_MAX: usize = 65_536;

/// Handles in one heartbeat message.
pub const HEARTBEAT_HANDLES_MAX: usize = 1_024;

/// Bytes of one control message on a side channel. A heartbeat with the most handles is the largest.
pub const CONTROL_MESSAGE_MAX_BYTES: usize = 32 * 1024;

// A consumer may lose heartbeats and keep the lease: the extension must span several intervals.
const _: () = assert!(HEARTBEAT_EXTENSION.0 * HEARTBEATS_PER_LEASE >= 4 * HEARTBEAT_EXTENSION.1);
const _: () = assert!(TOMBSTONE_TTL.as_secs() > KV_LEASE_DURATION.as_secs() + DRAIN_DEADLINE.as_secs());
const _: () = assert!(HEARTBEAT_HANDLES_MAX * 16 + 64 <= CONTROL_MESSAGE_MAX_BYTES);
const _: () = assert!(TOMBSTONES_MAX <= LEASES_MAX);
// The wire format has 32 bits for the position of a token.
const _: () = assert!(BLOCKS_PER_HANDOFF_MAX * BLOCK_TOKENS_MAX <= u32::MAX as usize);
// All links of every expected consumer must fit.
const _: () = assert!(CONSUMERS_MAX * LINKS_MAX <= READERS_MAX);

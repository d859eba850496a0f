//! The conformance suite of all transports. A transport's own tests contain
//!
//! ```ignore
//! #[path = "../../tests/conformance/mod.rs"]
//! mod conformance;
//! transport_conformance!(start);  // fn start(Arc<TestProducer>) -> Box<dyn TransportHarness>
//!
//! fn pool(blocks: usize, block_bytes: usize) -> Region  // the memory of a producer's pool
//! ```
//!
//! and get every test below under their own name.

// Each transport's tests compile this file. Nothing is public there, and clippy does not see a test.
#![allow(unreachable_pub, clippy::unwrap_used, reason = "several test crates include this file")]

mod cases;
mod producer;
mod slices;

pub use cases::*;
pub use producer::{GatePoint, TestProducer};
pub use slices::*;

use std::sync::Arc;

use baton_connector::transport::{Peer, Transport};

/// A transport between one producer and any number of consumers, for a test.
pub trait TransportHarness: Send + Sync {
    /// The consumer's side.
    fn transport(&self) -> Arc<dyn Transport>;
    /// The producer, as consumers address it.
    fn peer(&self) -> Peer;
    /// Ends the producer's side at once.
    fn kill(&mut self);
    /// Idle connections of the consumer.
    fn idle_connections(&self) -> usize;
    /// The configured bound on silence.
    fn silence(&self) -> std::time::Duration;
}

/// One `#[test]` per guarantee, with the attributes before `$start`.
#[macro_export]
macro_rules! transport_conformance {
    ($(#[$attribute:meta])* $start:path) => {
        transport_conformance!(@each ($(#[$attribute])*) $start,
            blocks_arrive_byte_by_byte_in_the_order_of_the_table
            landed_blocks_are_reported
            a_read_starts_at_any_entry_of_the_table
            neighbours_and_strangers_in_memory_arrive_alike
            a_closed_lease_is_gone
            a_lease_that_ends_in_mid_read_is_gone_and_so_is_its_verdict
            a_lease_that_is_released_in_mid_read_is_drained_and_valid
            blocks_that_are_still_computed_are_waited_for
            a_prefill_that_ends_early_is_gone_and_its_reader_is_not_waited_for
            no_read_is_valid_before_the_prefill_is_done
            another_epoch_is_gone
            another_layout_is_refused
            a_range_outside_the_table_is_refused_and_the_next_read_works
            a_raised_stop_flag_ends_the_read_soon_and_for_good
            a_producer_that_dies_in_mid_read_is_an_error
            a_silent_producer_is_an_error_within_the_bound
            eight_consumers_read_at_once
            a_repeated_done_is_valid_and_a_strangers_is_not
            heartbeats_and_releases_do_not_wait_behind_a_read
            a_reader_that_gives_up_does_not_hold_a_release
            a_read_that_breaks_off_is_known_to_the_producer
            slices_arrive_byte_by_byte_for_all_ranks_and_block_sizes
            a_slice_whose_lease_ends_in_mid_read_is_gone_and_the_connection_stays_in_step
            a_slice_outside_the_lease_or_the_rank_is_refused_and_the_next_read_works
            whole_blocks_only_means_no_slices
            a_consumer_of_two_links_has_everything_after_both
            one_of_several_consumers_leaves_and_the_others_read_on
            a_dead_producer_leaves_no_connection
        );
    };
    (@each $attributes:tt $start:path, $($name:ident)*) => {
        $(transport_conformance!(@one $attributes $start, $name);)*
    };
    (@one ($(#[$attribute:meta])*) $start:path, $name:ident) => {
            #[test]
            $(#[$attribute])*
            fn $name() {
                conformance::$name(&|producer| $start(producer));
            }
    };
}

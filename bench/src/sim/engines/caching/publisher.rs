//! A publisher of KV events: the PUB half of ZMTP 3.0 (rfc.zeromq.org/spec/23) with vLLM's messages.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::broadcast;

/// Messages that a slow subscriber may be behind. Then it misses some, and sees a gap in their numbers.
const BEHIND_MAX: usize = 4_096;
/// Maximum bytes of a subscriber's command or subscription.
const COMMAND_BYTES_MAX: usize = 255;
const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";

/// The messages of one engine.
pub(super) struct Publisher {
    sender: broadcast::Sender<Arc<[u8]>>,
    /// The number of the next message. Messages are sent under the lock, so in their order.
    next: Mutex<u64>,
    subscribers: AtomicUsize,
}

impl Default for Publisher {
    fn default() -> Self {
        Self {
            sender: broadcast::Sender::new(BEHIND_MAX),
            next: Mutex::default(),
            subscribers: AtomicUsize::new(0),
        }
    }
}

/// Blocks of a prompt that are cached now.
pub(super) struct StoredEvent<'a> {
    pub hashes: &'a [u64],
    pub parent: Option<u64>,
    pub tokens: &'a [u32],
    pub block_tokens: usize,
    pub salt: Option<&'a str>,
}

impl StoredEvent<'_> {
    pub(super) fn json(&self) -> Value {
        // A salt is a key of a prompt's first block.
        let salt = self.salt.filter(|_| self.parent.is_none());
        let keys = self.hashes.iter().enumerate().map(|(at, _)| match (at, salt) {
            (0, Some(salt)) => json!([salt]),
            _ => Value::Null,
        });
        json!({"type": "BlockStored", "block_hashes": self.hashes, "parent_block_hash": self.parent,
            "token_ids": self.tokens, "block_size": self.block_tokens, "lora_id": null, "medium": "GPU",
            "lora_name": null, "extra_keys": keys.collect::<Vec<_>>(), "group_idx": 0,
            "kv_cache_spec_kind": "full_attention"})
    }
}

/// Blocks that are cached no more.
pub(super) fn removed(hashes: &[u64]) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0})
}

impl Publisher {
    /// Sends one message with these events to every subscriber.
    pub(super) fn publish(&self, events: &[Value]) {
        let payload =
            rmp_serde::to_vec(&json!([0.0, events, 0])).expect("JSON can be written as MessagePack");
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let mut message = Vec::with_capacity(payload.len() + 32);
        for (frame, more) in [(&b""[..], true), (&next.to_be_bytes(), true), (&payload, false)] {
            message.push(if more { 3 } else { 2 });
            message.extend_from_slice(&(frame.len() as u64).to_be_bytes());
            message.extend_from_slice(frame);
        }
        *next += 1;
        // Without a subscriber the message is lost, as with ZeroMQ.
        let _ = self.sender.send(message.into());
    }

    /// Subscribers that get messages.
    pub(super) fn subscribers(&self) -> usize {
        self.subscribers.load(Ordering::Relaxed)
    }

    /// Serves one subscriber until its connection ends.
    pub(super) async fn serve(&self, mut stream: TcpStream) -> io::Result<()> {
        let mut greeting = [0_u8; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await?;
        stream.read_exact(&mut greeting).await?;
        stream.write_all(READY).await?;
        // The subscriber's READY, then its subscription.
        for _ in 0..2 {
            let (_flags, length) = (stream.read_u8().await?, stream.read_u8().await?);
            let mut command = [0_u8; COMMAND_BYTES_MAX];
            stream.read_exact(&mut command[..usize::from(length)]).await?;
        }
        let mut messages = self.sender.subscribe();
        self.subscribers.fetch_add(1, Ordering::Relaxed);
        let ended = async {
            loop {
                match messages.recv().await {
                    Ok(message) => stream.write_all(&message).await?,
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return Ok(()),
                }
            }
        };
        let ended = ended.await;
        self.subscribers.fetch_sub(1, Ordering::Relaxed);
        ended
    }
}

//! Memory of the software device, and the log of accesses to it.
#![allow(unsafe_code, reason = "slices of memory that other threads use too; see each block")]

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_connector::BlockId;
use baton_connector::region::Region;

use super::shared_memory_pool::SharedMemoryPool;
use baton_engine::compute::cuda::device::HostRun;

/// Plain bytes: the device's own, a region's, or a pool's.
pub(super) enum MemoryBytes {
    Own(Vec<u8>),
    /// Host memory.
    Region(Region),
    /// Device memory that other threads use too, none of them while the device works (`SoftwareDevice::work`).
    Shared(SharedMemoryPool),
}

impl MemoryBytes {
    pub(super) fn zeroed(bytes: usize) -> Self {
        Self::Own(vec![0; bytes])
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Region(region) => region.blocks() * region.block_bytes(),
            Self::Shared(pool) => pool.bytes(),
        }
    }

    /// # Panics
    /// For a region, which is host memory.
    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Region(_) => panic!("device memory is not a region"),
            // SAFETY: all of a pool that lives as long as `self`. The device locks `SoftwareDevice::work` while it
            // works, so that no other thread of this process writes it; other processes only read it.
            Self::Shared(pool) => unsafe { std::slice::from_raw_parts(pool.base(), pool.bytes()) },
        }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Region(_) => panic!("device memory is not a region"),
            // SAFETY: as above, and no other thread of this process reads it meanwhile.
            Self::Shared(pool) => unsafe { std::slice::from_raw_parts_mut(pool.base(), pool.bytes()) },
        }
    }

    /// Address of byte `at` in this process.
    pub(super) fn address(&mut self, at: usize) -> u64 {
        self.as_mut_slice()[at..].as_mut_ptr().expose_provenance() as u64
    }

    pub(super) fn write(&mut self, at: usize, from: &[u8]) {
        match self {
            Self::Own(_) | Self::Shared(_) => self.as_mut_slice()[at..at + from.len()].copy_from_slice(from),
            Self::Region(region) => in_blocks(region, at, from.len(), |block, within, part| {
                let mut whole = region.read_block(block);
                whole[within..within + part.len()].copy_from_slice(&from[part]);
                region.write_block(block, &whole);
            }),
        }
    }

    pub(super) fn read(&self, at: usize, to: &mut [u8]) {
        match self {
            Self::Own(_) | Self::Shared(_) => to.copy_from_slice(&self.as_slice()[at..at + to.len()]),
            Self::Region(region) => in_blocks(region, at, to.len(), |block, within, part| {
                let whole = region.read_block(block);
                to[part.clone()].copy_from_slice(&whole[within..within + part.len()]);
            }),
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies bytes of a pool to host memory. The caller holds the pool's lock.
pub(super) fn copy_out(pool: &SharedMemoryPool, run: &HostRun, host: &Region) {
    let (pool, host) = places(pool, run, host);
    // SAFETY: inside both, which live through the call and are different memory. The caller's lock excludes others from
    // the pool. The states of blocks and slots exclude others from these bytes of the host.
    unsafe { std::ptr::copy_nonoverlapping(pool.cast_const(), host, run.bytes) };
}

/// Copies bytes of host memory to a pool. The caller holds the pool's lock.
pub(super) fn copy_in(pool: &SharedMemoryPool, run: &HostRun, host: &Region) {
    let (pool, host) = places(pool, run, host);
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(host.cast_const(), pool, run.bytes) };
}

fn places(pool: &SharedMemoryPool, run: &HostRun, host: &Region) -> (*mut u8, *mut u8) {
    let inside = run.is_inside(pool.bytes(), host.blocks() * host.block_bytes());
    assert!(inside, "{run:?} of a pool of {} bytes", pool.bytes());
    (pool.base().wrapping_add(run.pool), host.block_ptr(BlockId(0)).wrapping_add(run.host))
}

/// Calls `each(block, first byte in it, range of the whole)` for a range of a region's bytes.
fn in_blocks(
    region: &Region,
    at: usize,
    len: usize,
    mut each: impl FnMut(BlockId, usize, std::ops::Range<usize>),
) {
    let mut done = 0;
    while done < len {
        let (block, within) = ((at + done) / region.block_bytes(), (at + done) % region.block_bytes());
        let now = (region.block_bytes() - within).min(len - done);
        each(BlockId(u32::try_from(block).expect("blocks are counted in 32 bits")), within, done..done + now);
        done += now;
    }
}

/// The time of each stream and of the host up to a point.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct VectorClock(Vec<u64>);

impl VectorClock {
    pub(super) fn tick(&mut self, place: usize) {
        if self.0.len() <= place {
            self.0.resize(place + 1, 0);
        }
        self.0[place] += 1;
    }

    pub(super) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }

    pub(super) fn at(&self, place: usize) -> u64 {
        self.0.get(place).copied().unwrap_or(0)
    }
}

/// A range of accessed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AccessSpan {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) write: bool,
}

impl AccessSpan {
    /// The first `bytes` bytes.
    pub(super) fn first(bytes: usize, write: bool) -> Self {
        Self { start: 0, end: bytes, write }
    }
}

#[derive(Clone, Copy, Debug)]
struct Access {
    span: AccessSpan,
    place: usize,
    time: u64,
}

/// Two accesses without an order.
#[derive(Debug)]
pub(super) struct AccessConflict {
    now: AccessSpan,
    before: AccessSpan,
    place: usize,
}

impl fmt::Display for AccessConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = |span: &AccessSpan| if span.write { "written" } else { "read" };
        let who = if self.place == 0 { "the host".to_owned() } else { format!("stream {}", self.place) };
        write!(
            f,
            "bytes {}..{} are {} while bytes {}..{} may still be {} by {who}",
            self.now.start,
            self.now.end,
            word(&self.now),
            self.before.start,
            self.before.end,
            word(&self.before)
        )
    }
}

/// Accesses that the host has not waited for.
#[derive(Debug, Default)]
pub(super) struct AccessLog(Vec<Access>);

impl AccessLog {
    /// Adds an access by `place` at its time in `now`, if all conflicting accesses came before.
    pub(super) fn record(
        &mut self,
        span: AccessSpan,
        place: usize,
        now: &VectorClock,
    ) -> Result<(), AccessConflict> {
        for access in &self.0 {
            let overlap = access.span.start < span.end && span.start < access.span.end;
            let conflict = overlap && (access.span.write || span.write);
            if conflict && now.at(access.place) < access.time {
                return Err(AccessConflict { now: span, before: access.span, place: access.place });
            }
        }
        // An earlier access that this one covers and follows is dropped: accesses that follow this one follow it too.
        self.0.retain(|access| {
            let covered = span.start <= access.span.start && access.span.end <= span.end;
            let replaced =
                covered && (span.write || !access.span.write) && now.at(access.place) >= access.time;
            !(replaced && (span.write || access.place == place))
        });
        self.0.push(Access { span, place, time: now.at(place) });
        Ok(())
    }

    pub(super) fn forget(&mut self, known: &VectorClock) {
        self.0.retain(|access| known.at(access.place) < access.time);
    }

    /// Whether the host has waited for every access to these bytes that `write` conflicts with.
    pub(super) fn is_settled(&self, start: usize, end: usize, write: bool) -> bool {
        let overlaps = |access: &Access| access.span.start < end && start < access.span.end;
        !self.0.iter().any(|access| overlaps(access) && (access.span.write || write))
    }

    /// Whether all accesses in the log came before `known`.
    pub(super) fn is_quiet(&self, known: &VectorClock) -> bool {
        self.0.iter().all(|access| known.at(access.place) >= access.time)
    }
}

//! How many blocks the KV pool has on a device. Pure, but for [`host_bytes`].
//!
//! ```text
//!   total × share ── own weights and buffers ── reserve ─┐
//!   free, once weights and buffers are there ── reserve ─┼─ the least ─▶ blocks
//!   half of the host's memory, for the mirror ───────────┘
//! ```
//!
//! The share is of the whole device and for this engine alone, as vLLM's `--gpu-memory-utilization`: two engines with half
//! each fit one device, whichever starts first.

use std::fmt;

/// What a device keeps for its library's workspace (64 MiB), recorded graphs and the contexts of peers that read the pool.
const RESERVE_BYTES: usize = 512 << 20;
/// Of a small device it is a part at most.
const RESERVE_PART: usize = 8;

/// How large the KV pool is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PoolSize {
    /// So many blocks; at least one.
    Blocks(usize),
    /// What fits into this share of the device's memory, above 0 and at most 1, beside weights and buffers.
    Share(f64),
}

/// Memory at the moment at which the pool is made, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// All of the device's.
    pub total: usize,
    /// What is free there, with this engine's weights and buffers in place.
    pub free: usize,
    /// What those take.
    pub own: usize,
    /// What is left free.
    pub reserve: usize,
    /// What the host has for the mirror, which is as large as the pool.
    pub host: usize,
}

impl Memory {
    /// The reserve of a device of so many bytes.
    #[must_use]
    pub fn reserve_of(total: usize) -> usize {
        RESERVE_BYTES.min(total / RESERVE_PART)
    }
}

/// What was chosen, and by what it is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Blocks; at least two.
    pub blocks: usize,
    /// For people.
    pub bound: &'static str,
}

/// There is no room for two blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TooSmall {
    share: f64,
    memory: Memory,
    block_bytes: usize,
    chosen: Chosen,
}

impl fmt::Display for TooSmall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Memory { total, free, own, reserve, host } = self.memory;
        write!(
            f,
            "the KV cache would hold {} blocks of {} bytes, 2 are needed, and is bounded by {}: {} of {total} bytes less \
             {own} of weights and buffers, {free} bytes are free, {reserve} of them are kept back, and the mirror may \
             take {host} bytes of host memory; --gpu-memory-utilization sets the share, --kv-cache-mib the size",
            self.chosen.blocks, self.block_bytes, self.chosen.bound, self.share
        )
    }
}

/// Blocks of `block_bytes` for a share of a device, `most` at most.
///
/// # Errors
/// [`TooSmall`].
pub fn blocks(share: f64, memory: &Memory, block_bytes: usize, most: usize) -> Result<Chosen, TooSmall> {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let of_share = (memory.total as f64 * share) as usize;
    let kept = memory.own.saturating_add(memory.reserve);
    let bounds = [
        (of_share.saturating_sub(kept) / block_bytes, "the share of the device's memory"),
        (memory.free.saturating_sub(memory.reserve) / block_bytes, "the device's free memory"),
        (memory.host / block_bytes, "the host's memory, for the mirror"),
        (most, "the numbers of slots"),
    ];
    let (blocks, bound) = bounds.into_iter().min_by_key(|(blocks, _)| *blocks).expect("there are four");
    let chosen = Chosen { blocks, bound };
    if blocks < 2 {
        return Err(TooSmall { share, memory: *memory, block_bytes, chosen });
    }
    Ok(chosen)
}

/// Half of the memory that the host can give to this process: the mirror is page-locked, and the rest of the process, its
/// tiers and other engines need some too.
#[must_use]
pub fn host_bytes() -> usize {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let groups = groups(&read("/proc/self/cgroup"));
    let groups = groups.iter().map(|group| {
        let file = |name: &str| read(&format!("/sys/fs/cgroup{group}/{name}"));
        left_of_group(&file("memory.max"), &file("memory.current"), &file("memory.stat"))
    });
    groups.chain([available(&read("/proc/meminfo"))]).min().unwrap_or(usize::MAX) / 2
}

/// The control group of this process and those around it, as folders, of version 2: a limit may stand at any of them.
fn groups(own: &str) -> Vec<String> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let folders = std::path::Path::new(own).ancestors().take(16);
    folders.map(|folder| folder.display().to_string().trim_end_matches('/').to_owned()).collect()
}

/// What `/proc/meminfo` calls available. What cannot be read bounds nothing.
fn available(meminfo: &str) -> usize {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().split(' ').next()?.parse::<usize>().ok());
    kib.and_then(|kib| kib.checked_mul(1 << 10)).unwrap_or(usize::MAX)
}

/// What a control group has left: files in its memory, such as the weights that were just read, give way.
fn left_of_group(limit: &str, current: &str, stat: &str) -> usize {
    // "max", or no such file: no limit.
    let Ok(limit) = limit.trim().parse::<usize>() else { return usize::MAX };
    let of_files = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        matches!(name, "active_file" | "inactive_file").then(|| bytes.trim().parse::<usize>().ok()).flatten()
    };
    let files: usize = stat.lines().filter_map(of_files).sum();
    let held = current.trim().parse::<usize>().unwrap_or(0).saturating_sub(files);
    limit.saturating_sub(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;
    const BLOCK: usize = 2 << 20;
    /// Llama 3.1 8B in bf16 on an H100.
    const H100: Memory =
        Memory { total: 80 * GIB, free: 63 * GIB, own: 16 * GIB, reserve: GIB / 2, host: 400 * GIB };

    fn sized(share: f64, memory: Memory) -> (usize, &'static str) {
        let chosen = blocks(share, &memory, BLOCK, usize::MAX).expect("there is room");
        (chosen.blocks, chosen.bound)
    }

    #[test]
    fn the_pool_is_what_the_share_leaves_beside_weights_and_reserve() {
        // 72 GiB, less 16.5.
        assert_eq!(sized(0.9, H100), (55 * 512 + 256, "the share of the device's memory"));
        assert_eq!(sized(0.45, H100), (19 * 512 + 256, "the share of the device's memory"));
    }

    #[test]
    fn what_another_engine_holds_of_the_device_is_left_alone() {
        let beside = Memory { free: 20 * GIB, ..H100 };
        assert_eq!(sized(0.9, beside), (19 * 512 + 256, "the device's free memory"));
        // A share that both have is theirs in either order of their starts.
        let second = Memory { free: 80 * GIB - 36 * GIB - 16 * GIB - GIB, ..H100 };
        assert_eq!(sized(0.45, second).0, sized(0.45, H100).0);
    }

    #[test]
    fn the_mirror_fits_the_host_and_slots_fit_their_numbers() {
        let small_host = Memory { host: 8 * GIB, ..H100 };
        assert_eq!(sized(0.9, small_host), (8 * 512, "the host's memory, for the mirror"));
        let chosen = blocks(1.0, &H100, BLOCK, 1000).expect("there is room");
        assert_eq!((chosen.blocks, chosen.bound), (1000, "the numbers of slots"));
    }

    #[test]
    fn no_room_is_an_error_with_the_numbers_and_the_options() {
        for memory in [
            Memory { free: 0, ..H100 },
            Memory { own: 73 * GIB, ..H100 },
            Memory { host: BLOCK, ..H100 },
            Memory { total: 0, free: 0, own: 0, reserve: 0, host: 0 },
            Memory { own: usize::MAX, reserve: usize::MAX, ..H100 },
        ] {
            let error = blocks(0.9, &memory, BLOCK, usize::MAX).expect_err("no room").to_string();
            for part in
                ["--gpu-memory-utilization", "--kv-cache-mib", "2 are needed", &memory.free.to_string()]
            {
                assert!(error.contains(part), "{error}");
            }
        }
    }

    #[test]
    fn small_devices_keep_a_small_reserve() {
        assert_eq!(Memory::reserve_of(80 * GIB), GIB / 2);
        assert_eq!(Memory::reserve_of(64 << 20), 8 << 20);
    }

    #[test]
    fn host_memory_is_what_system_and_control_groups_have_left() {
        let meminfo = "MemTotal:       32768 kB\nMemFree:  1 kB\nMemAvailable:   16384 kB\nBuffers: 2 kB\n";
        assert_eq!((available(meminfo), available("")), (16 << 20, usize::MAX));
        for (limit, current, stat, left) in [
            ("max\n", "5\n", "", usize::MAX),
            ("", "", "", usize::MAX),
            ("10000000\n", "4000000\n", "", 6_000_000),
            ("4000000\n", "5000000\n", "", 0),
            // The weights have just been read.
            (
                "10000000\n",
                "9000000\n",
                "anon 1000000\ninactive_file 5000000\nactive_file 3000000\nslab 7\n",
                9_000_000,
            ),
            ("10000000\n", "4000000\n", "inactive_file 8000000\n", 10_000_000),
        ] {
            assert_eq!(left_of_group(limit, current, stat), left, "{limit} {current} {stat}");
        }
        assert_eq!(groups("12:memory:/old\n0::/a.slice/b.service\n"), ["/a.slice/b.service", "/a.slice", ""]);
        assert_eq!((groups("0::/\n"), groups("")), (vec![String::new()], vec![String::new()]));
    }
}

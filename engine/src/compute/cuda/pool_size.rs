//! The number of blocks of the KV pool on a device. Pure, except [`host_bytes`].
//!
//! ```text
//!   total × share ── own weights and buffers ── reserve ─┐
//!   free, after weights and buffers ── reserve ──────────┼─ the least ─▶ blocks
//!   half of the host's memory, if there is a mirror ─────┘
//! ```
//!
//! The share refers to the whole device and to this engine alone, as vLLM's `--gpu-memory-utilization`. Two engines
//! with half each therefore fit one device, whichever starts first.

use std::fmt;

/// Reserve for the library's workspace (64 MiB), recorded graphs and the contexts of peers that read the pool.
const RESERVE_BYTES: usize = 512 << 20;
/// The reserve is at most this fraction of a device.
const RESERVE_PART: usize = 8;

/// Size of the KV pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PoolSize {
    /// This number of blocks; at least one.
    Blocks(usize),
    /// The blocks that fit, besides weights and buffers, into this share of the device's memory: above 0, at most 1.
    Share(f64),
}

/// Memory sizes when the pool is created, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySizes {
    /// All memory of the device.
    pub total: usize,
    /// Free memory of the device, after this engine's weights and buffers were allocated.
    pub free: usize,
    /// Size of these weights and buffers.
    pub own: usize,
    /// Bytes that stay free.
    pub reserve: usize,
    /// Host memory for the mirror, which is as large as the pool. `None` without a mirror.
    pub host: Option<usize>,
}

impl MemorySizes {
    /// The reserve of a device with `total` bytes.
    #[must_use]
    pub fn reserve_of(total: usize) -> usize {
        RESERVE_BYTES.min(total / RESERVE_PART)
    }
}

/// The chosen size, and its limiting factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolChoice {
    /// Blocks; at least two.
    pub blocks: usize,
    /// Description for logs.
    pub bound: &'static str,
}

/// There is no memory for two blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PoolSizeError {
    share: f64,
    memory: MemorySizes,
    block_bytes: usize,
    chosen: PoolChoice,
}

impl fmt::Display for PoolSizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemorySizes { total, free, own, reserve, host } = self.memory;
        write!(
            f,
            "the KV cache would hold {} blocks of {} bytes, 2 are needed, and is bounded by {}: {} of {total} bytes less \
             {own} of weights and buffers, {free} bytes are free, {reserve} of them are kept back",
            self.chosen.blocks, self.block_bytes, self.chosen.bound, self.share
        )?;
        if let Some(host) = host {
            write!(f, ", and the mirror may take {host} bytes of host memory")?;
        }
        f.write_str("; --gpu-memory-utilization sets the share, --kv-cache-mib the size")
    }
}

/// Number of blocks of `block_bytes` for a share of a device, at most `most`.
///
/// # Errors
/// [`PoolSizeError`].
pub fn blocks(
    share: f64,
    memory: &MemorySizes,
    block_bytes: usize,
    most: usize,
) -> Result<PoolChoice, PoolSizeError> {
    let of_share = (memory.total as f64 * share) as usize;
    let kept = memory.own.saturating_add(memory.reserve);
    let bounds = [
        (of_share.saturating_sub(kept) / block_bytes, "the share of the device's memory"),
        (memory.free.saturating_sub(memory.reserve) / block_bytes, "the device's free memory"),
        (memory.host.map_or(usize::MAX, |host| host / block_bytes), "the host's memory, for the mirror"),
        (most, "the numbers of slots"),
    ];
    let (blocks, bound) = bounds.into_iter().min_by_key(|(blocks, _)| *blocks).expect("there are four");
    let chosen = PoolChoice { blocks, bound };
    if blocks < 2 {
        return Err(PoolSizeError { share, memory: *memory, block_bytes, chosen });
    }
    Ok(chosen)
}

/// Half of the memory that the host can give to this process. The mirror is page-locked, and the rest of the process,
/// its tiers and other engines need memory too.
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

/// The control group of this process and its ancestors, as folders, of version 2: each of them may have a limit.
fn groups(own: &str) -> Vec<String> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let folders = std::path::Path::new(own).ancestors().take(16);
    folders.map(|folder| folder.display().to_string().trim_end_matches('/').to_owned()).collect()
}

/// `MemAvailable` of `/proc/meminfo`. An unreadable value sets no bound.
fn available(meminfo: &str) -> usize {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.trim().split(' ').next()?.parse::<usize>().ok());
    kib.and_then(|kib| kib.checked_mul(1 << 10)).unwrap_or(usize::MAX)
}

/// The memory that a control group has left. File pages, such as the weights that were just read, count as free.
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
    const H100: MemorySizes = MemorySizes {
        total: 80 * GIB,
        free: 63 * GIB,
        own: 16 * GIB,
        reserve: GIB / 2,
        host: Some(400 * GIB),
    };

    fn sized(share: f64, memory: MemorySizes) -> (usize, &'static str) {
        let chosen = blocks(share, &memory, BLOCK, usize::MAX).expect("the pool fits");
        (chosen.blocks, chosen.bound)
    }

    #[test]
    fn the_pool_is_what_the_share_leaves_beside_weights_and_reserve() {
        // 72 GiB minus 16.5.
        assert_eq!(sized(0.9, H100), (55 * 512 + 256, "the share of the device's memory"));
        assert_eq!(sized(0.45, H100), (19 * 512 + 256, "the share of the device's memory"));
    }

    #[test]
    fn device_memory_of_another_engine_is_not_used() {
        let occupied = MemorySizes { free: 20 * GIB, ..H100 };
        assert_eq!(sized(0.9, occupied), (19 * 512 + 256, "the device's free memory"));
        // Two engines with the same share get the same pool in either order of their starts.
        let second = MemorySizes { free: 80 * GIB - 36 * GIB - 16 * GIB - GIB, ..H100 };
        assert_eq!(sized(0.45, second).0, sized(0.45, H100).0);
    }

    #[test]
    fn the_mirror_fits_the_host_and_slots_fit_their_numbers() {
        let small_host = MemorySizes { host: Some(8 * GIB), ..H100 };
        assert_eq!(sized(0.9, small_host), (8 * 512, "the host's memory, for the mirror"));
        let no_mirror = MemorySizes { host: None, ..H100 };
        assert_eq!(sized(0.9, no_mirror), sized(0.9, H100), "the host's memory is no bound");
        let chosen = blocks(1.0, &H100, BLOCK, 1000).expect("there is room");
        assert_eq!((chosen.blocks, chosen.bound), (1000, "the numbers of slots"));
    }

    #[test]
    fn no_room_is_an_error_with_the_numbers_and_the_options() {
        for memory in [
            MemorySizes { free: 0, ..H100 },
            MemorySizes { own: 73 * GIB, ..H100 },
            MemorySizes { host: Some(BLOCK), ..H100 },
            MemorySizes { total: 0, free: 0, own: 0, reserve: 0, host: Some(0) },
            MemorySizes { own: usize::MAX, reserve: usize::MAX, ..H100 },
        ] {
            let error = blocks(0.9, &memory, BLOCK, usize::MAX).expect_err("no room").to_string();
            for part in
                ["--gpu-memory-utilization", "--kv-cache-mib", "2 are needed", &memory.free.to_string()]
            {
                assert!(error.contains(part), "{error}");
            }
            assert!(error.contains("bytes of host memory"), "{error}");
        }
        let no_mirror = MemorySizes { free: 0, host: None, ..H100 };
        let error = blocks(0.9, &no_mirror, BLOCK, usize::MAX).expect_err("no room").to_string();
        assert!(!error.contains("mirror") && error.contains("kept back; --gpu-memory"), "{error}");
    }

    #[test]
    fn small_devices_keep_a_small_reserve() {
        assert_eq!(MemorySizes::reserve_of(80 * GIB), GIB / 2);
        assert_eq!(MemorySizes::reserve_of(64 << 20), 8 << 20);
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

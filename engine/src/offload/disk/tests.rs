//! The disk tier's files, after damage, restarts and errors of the file system.

use std::os::unix::fs::PermissionsExt;

use super::*;

const BYTES: usize = 1000;
const IDENTITY: TierIdentity = TierIdentity { layout: 7, model: [1; 16] };

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn block(n: u8) -> Vec<u8> {
    (0..BYTES).map(|i| n.wrapping_add(i as u8)).collect()
}

fn open(root: &Path) -> (DiskTier, Vec<BlockHash>) {
    let (folder, found) = DiskFolder::open(root, &IDENTITY, BYTES).expect("opened");
    (DiskTier::new(Box::new(folder), IDENTITY, BYTES), found.blocks)
}

fn path(root: &Path, n: u8) -> PathBuf {
    let name = hash(n).to_string();
    root.join(IDENTITY.folder()).join(&name[..2]).join(format!("{name}.kv"))
}

fn read(disk: &DiskTier, n: u8) -> Result<Vec<u8>, OffloadFault> {
    disk.read(hash(n)).map(|file| file[HEADER_BYTES..].to_vec())
}

#[test]
fn written_files_are_found_after_a_restart_in_order_of_use() {
    let root = tempfile::tempdir().expect("a folder");
    let (disk, found) = open(root.path());
    assert_eq!(found, []);
    for n in [3, 1, 2] {
        disk.write(hash(n), &block(n)).expect("written");
    }
    let old = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
    for (n, age) in [(3, 0), (1, 1), (2, 2)] {
        let file = File::options().write(true).open(path(root.path(), n)).expect("opened");
        file.set_modified(old + std::time::Duration::from_secs(age)).expect("set");
    }
    assert_eq!(read(&disk, 3), Ok(block(3)), "it is used, so it is evicted last");
    drop(disk);
    let (disk, found) = open(root.path());
    assert_eq!(found, [1, 2, 3].map(hash));
    assert_eq!(read(&disk, 1), Ok(block(1)));
}

#[test]
fn flipped_truncated_and_swapped_files_are_detected_and_deleted() {
    let root = tempfile::tempdir().expect("a folder");
    let (disk, _) = open(root.path());
    let damage: [&dyn Fn(&Path); 4] = [
        &|path| {
            let mut bytes = fs::read(path).expect("read");
            bytes[HEADER_BYTES + 500] ^= 1;
            fs::write(path, bytes).expect("written");
        },
        &|path| {
            File::options()
                .write(true)
                .open(path)
                .expect("opened")
                .set_len(HEADER_BYTES as u64 + 9)
                .expect("cut")
        },
        &|path| fs::write(path, b"").expect("emptied"),
        &|path| assert!(fs::copy(self::path(root.path(), 9), path).is_ok()),
    ];
    disk.write(hash(9), &block(9)).expect("written");
    for damage in damage {
        disk.write(hash(1), &block(1)).expect("written");
        damage(&path(root.path(), 1));
        assert_eq!(read(&disk, 1), Err(OffloadFault::Corrupt));
        assert_eq!(read(&disk, 1), Err(OffloadFault::Missing), "it is deleted");
    }
}

#[test]
fn opening_deletes_damaged_files_keeps_foreign_ones_and_follows_no_link() {
    let root = tempfile::tempdir().expect("a folder");
    let (disk, _) = open(root.path());
    disk.write(hash(1), &block(1)).expect("written");
    disk.write(hash(2), &block(2)).expect("written");
    drop(disk);
    let folder = path(root.path(), 1).parent().expect("a folder").to_owned();
    let top = root.path().join(IDENTITY.folder());
    // Truncated by a crash, unfinished, foreign, in the wrong place, a folder and a link in place of a file.
    fs::write(path(root.path(), 2), b"short").expect("written");
    let name = hash(1).to_string();
    fs::write(folder.join(format!("{name}.tmp")), b"half").expect("written");
    fs::write(folder.join("README"), b"foreign").expect("written");
    fs::write(top.join("notes.txt"), b"foreign").expect("written");
    fs::write(folder.join(format!("{}.kv", hash(0x77))), vec![0; HEADER_BYTES + BYTES]).expect("written");
    fs::create_dir(folder.join(format!("{}.kv", "01".repeat(31) + "02"))).expect("made");
    std::os::unix::fs::symlink("/dev/zero", folder.join(format!("{}.kv", "01".repeat(31) + "03")))
        .expect("linked");

    let (kept, found) = DiskFolder::open(root.path(), &IDENTITY, BYTES).expect("opened");
    assert_eq!(found.blocks, [hash(1)]);
    assert_eq!((found.damaged, found.foreign), (2, 5));
    assert!(folder.join("README").exists() && top.join("notes.txt").exists());
    assert!(!path(root.path(), 2).exists() && !folder.join(format!("{name}.tmp")).exists());
    let disk = DiskTier::new(Box::new(kept), IDENTITY, BYTES);
    let linked: BlockHash = ("01".repeat(31) + "03").parse().expect("a hash");
    assert_eq!(disk.read(linked), Err(OffloadFault::Io), "a link is not followed");
}

#[test]
fn another_model_or_layout_finds_no_block_and_deletes_none() {
    let root = tempfile::tempdir().expect("a folder");
    let (disk, _) = open(root.path());
    disk.write(hash(1), &block(1)).expect("written");
    let other = TierIdentity { layout: 8, ..IDENTITY };
    let (_, found) = DiskFolder::open(root.path(), &other, BYTES).expect("opened beside the first");
    assert_eq!(found.blocks, []);
    assert_eq!(read(&disk, 1), Ok(block(1)));
}

#[test]
fn a_folder_belongs_to_one_engine_at_a_time() {
    let root = tempfile::tempdir().expect("a folder");
    let first = open(root.path());
    assert!(matches!(DiskFolder::open(root.path(), &IDENTITY, BYTES), Err(FolderError::InUse(_))));
    drop(first);
    open(root.path());
}

#[test]
fn prompts_on_disk_are_for_their_owner_only() {
    let root = tempfile::tempdir().expect("a folder");
    let (disk, _) = open(root.path());
    disk.write(hash(1), &block(1)).expect("written");
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let file = path(root.path(), 1);
    assert_eq!(mode(&file), 0o600);
    assert_eq!(mode(file.parent().expect("a folder")), 0o700);
}

#[test]
fn a_deleted_directory_is_recreated_and_its_blocks_are_missing() {
    let root = tempfile::tempdir().expect("a folder");
    let (disk, _) = open(root.path());
    disk.write(hash(1), &block(1)).expect("written");
    fs::remove_dir_all(root.path()).expect("deleted");
    assert_eq!(read(&disk, 1), Err(OffloadFault::Missing));
    assert_eq!(disk.delete(&[hash(1)]), Ok(()));
    disk.write(hash(2), &block(2)).expect("written");
    assert_eq!(read(&disk, 2), Ok(block(2)));
}

#[test]
fn a_file_at_the_path_of_the_directory_is_an_error() {
    let root = tempfile::tempdir().expect("a folder");
    let (disk, _) = open(root.path());
    disk.write(hash(1), &block(1)).expect("written");
    let folder = root.path().join(IDENTITY.folder());
    fs::remove_dir_all(&folder).expect("deleted");
    fs::write(&folder, b"in the way").expect("written");
    assert_eq!(disk.write(hash(2), &block(2)), Err(OffloadFault::Io));
    assert!(disk.read(hash(1)).is_err() && disk.delete(&[hash(1)]).is_err() && disk.probe().is_err());
    assert!(matches!(DiskFolder::open(root.path(), &IDENTITY, BYTES), Err(FolderError::System { .. })));
}

/// A real file system of 64 KiB, if the tests may mount one.
#[test]
fn a_full_file_system_is_an_error_and_leaves_no_file() {
    let root = tempfile::tempdir().expect("a folder");
    let mount = |arguments: &[&str]| {
        let done = std::process::Command::new("mount").args(arguments).arg(root.path()).output();
        done.is_ok_and(|done| done.status.success())
    };
    if !mount(&["-t", "tmpfs", "-o", "size=64k,nr_inodes=64", "tmpfs"]) {
        eprintln!(
            "SKIPPED: no permission to mount a tmpfs; a full disk is tested with an injected ENOSPC only"
        );
        return;
    }
    let (folder, _) = DiskFolder::open(root.path(), &IDENTITY, 16 << 10).expect("opened");
    let disk = DiskTier::new(Box::new(folder), IDENTITY, 16 << 10);
    let outcomes: Vec<_> = (0..8).map(|n| disk.write(hash(n), &vec![n; 16 << 10])).collect();
    let whole = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    assert!((1..8).contains(&whole), "{outcomes:?}");
    assert!(outcomes.contains(&Err(OffloadFault::Full)), "{outcomes:?}");
    assert!(disk.read(hash(0)).is_ok(), "what was written before is whole");
    disk.delete(&[hash(0)]).expect("deleted");
    assert_eq!(disk.write(hash(9), &vec![9; 16 << 10]), Ok(()), "the failed writes left nothing behind");
    drop(disk);
    let unmounted = std::process::Command::new("umount").arg(root.path()).status();
    assert!(unmounted.is_ok_and(|status| status.success()));
}

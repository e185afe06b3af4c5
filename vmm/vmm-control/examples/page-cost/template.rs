//! A template in different forms, and clones of them.

use std::{
    fs::File,
    io::{self, Write},
    path::PathBuf,
    sync::Arc,
};

use nix::{
    fcntl::{PosixFadviseAdvice, posix_fadvise},
    libc::{MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED},
    sys::{
        memfd::{MFdFlags, memfd_create},
        mman::MmapAdvise,
    },
};
use tempfile::TempDir;
use vmm_control::template::LoadedTemplate;

use crate::{
    report::memory_info,
    sys::{self, Answer, Faults, Handler, Mapping, PAGE},
};

/// Pages of a template: 256 MiB.
pub(crate) const PAGES: usize = 65_536;
/// Name of a template's memory file.
const MEMORY: &str = model::template_file::MEMORY;
/// Bytes that the VMM writes at once.
const WRITE: usize = 64 << 10;

/// Source of a clone's pages. All but `Anonymous` and `Uffd` are private mappings of files.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Backing {
    /// The copy that [`LoadedTemplate`] makes.
    Tmpfs,
    Memfd,
    Disk(Disk),
    /// A new file for each clone, with the same blocks.
    Reflink,
    Hugetlb,
    Anonymous,
    Uffd(Answer, Handler),
}

/// How a file on the disk file system got into its page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    /// By writes of 64 KiB, as the VMM writes a template.
    Written,
    /// By read(2), after the page cache was dropped: depends on `read_ahead_kb`.
    ReadBack,
    /// By page faults of a mapping with MADV_HUGEPAGE.
    HugePages,
}

/// How pages become private to a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ahead {
    Store,
    Populate,
    Copy,
    UffdCopy,
}

#[derive(Debug)]
pub(crate) struct Templates {
    loaded: LoadedTemplate,
    memfd: File,
    /// `None` if too few huge pages are free.
    hugetlb: Option<File>,
    disk: TempDir,
    reflink: Option<TempDir>,
    /// Source for handlers and copies: a mapping of `memfd`.
    source: Arc<Mapping>,
}

/// A clone's mapping. `faults` is dropped first, so no handler outlives the mapping.
#[derive(Debug)]
pub(crate) struct Clone {
    faults: Option<Faults>,
    pub(crate) mapping: Mapping,
}

impl Templates {
    pub(crate) fn new(disk: PathBuf, reflink: Option<PathBuf>) -> io::Result<Self> {
        let disk = tempfile::tempdir_in(disk)?;
        let reflink = reflink.map(tempfile::tempdir_in).transpose()?;
        for dir in [Some(&disk), reflink.as_ref()].into_iter().flatten() {
            fill(&mut File::create(dir.path().join(MEMORY))?)?;
        }
        read_back(&disk, Disk::ReadBack)?;
        read_back(&disk, Disk::HugePages)?;
        let loaded = LoadedTemplate::load(disk.path()).map_err(io::Error::other)?;
        let mut memfd = File::from(memfd_create("template", MFdFlags::MFD_CLOEXEC)?);
        fill(&mut memfd)?;
        let source = Arc::new(Mapping::new(Some(&memfd), PAGES, MAP_SHARED)?);
        let hugetlb = hugetlb(&source).inspect_err(|e| eprintln!("hugetlb: {e}"));
        Ok(Self {
            loaded,
            memfd,
            hugetlb: hugetlb.ok(),
            disk,
            reflink,
            source,
        })
    }

    pub(crate) fn start(&self, backing: Backing) -> io::Result<Clone> {
        let opened;
        let missing = |what| io::Error::other(format!("needs {what}"));
        let file = match backing {
            Backing::Memfd | Backing::Uffd(Answer::Continue, _) => Some(&self.memfd),
            Backing::Hugetlb => {
                let file = self.hugetlb.as_ref();
                Some(file.ok_or_else(|| missing("huge pages"))?)
            }
            Backing::Tmpfs => {
                opened = File::open(self.loaded.dir().join(MEMORY))?;
                Some(&opened)
            }
            Backing::Disk(disk) => {
                opened = File::open(file_name(&self.disk, disk))?;
                Some(&opened)
            }
            Backing::Reflink => {
                let dir = self.reflink.as_ref();
                opened = reflink(dir.ok_or_else(|| missing("REFLINK_DIR"))?)?;
                Some(&opened)
            }
            Backing::Anonymous | Backing::Uffd(Answer::Copy, _) => None,
        };
        let mapping = Mapping::new(file, PAGES, MAP_PRIVATE | MAP_NORESERVE)?;
        if let Backing::Disk(Disk::HugePages) = backing {
            mapping.advise(MmapAdvise::MADV_HUGEPAGE)?;
        }
        let faults = match backing {
            Backing::Uffd(answer, handler) => {
                Some(Faults::new(&mapping, &self.source, answer, handler)?)
            }
            _ => None,
        };
        Ok(Clone { faults, mapping })
    }

    /// Shows by mincore(2) whether files with the same blocks have the same pages in the page cache.
    pub(crate) fn print_reflinks(&self) -> io::Result<()> {
        match reflink(&self.disk) {
            Ok(_) => println!("DIR has FICLONE"),
            Err(e) => println!("DIR: FICLONE: {e}"),
        }
        let Some(dir) = &self.reflink else {
            return Ok(());
        };
        let memory = File::open(dir.path().join(MEMORY))?;
        let original = Mapping::new(Some(&memory), PAGES, MAP_PRIVATE)?;
        let clone = Mapping::new(Some(&reflink(dir)?), PAGES, MAP_PRIVATE)?;
        read(&original, 0..PAGES);
        let (file, before, all) = (original.cached(), clone.cached(), memory_info("Cached:")?);
        read(&clone, 0..PAGES);
        let grown = memory_info("Cached:")?.saturating_sub(all) >> 10;
        println!(
            "pages in the page cache: {file} of the file; of its reflink {before} before it was read, {} after. \
             Cached grew by {grown} MiB",
            clone.cached()
        );
        Ok(())
    }
}

impl Clone {
    /// Makes runs of pages (first, number) private by stores or ahead of them.
    pub(crate) fn write(&self, ahead: Ahead, runs: &[(usize, usize)], templates: &Templates) {
        for (page, count) in runs.iter().copied() {
            match (ahead, &self.faults) {
                (Ahead::Store, _) => (page..page + count).for_each(|page| self.mapping.write(page)),
                (Ahead::Populate, _) => self.mapping.populate_write(page, count),
                (Ahead::UffdCopy, Some(faults)) => {
                    faults.copy(&self.mapping, page, count, &templates.source);
                }
                (Ahead::Copy | Ahead::UffdCopy, _) => {
                    self.mapping.copy(page, count, &templates.source);
                }
            }
        }
    }
}

/// Reads a byte of each page.
pub(crate) fn read(mapping: &Mapping, pages: impl Iterator<Item = usize>) {
    for page in pages {
        mapping.read(page);
    }
}

/// Writes a template's memory without a page of zeros.
fn fill(file: &mut File) -> io::Result<()> {
    let bytes = vec![0xA5; WRITE];
    (0..PAGES * PAGE / WRITE).try_for_each(|_| file.write_all(&bytes))?;
    file.sync_all()
}

fn file_name(dir: &TempDir, disk: Disk) -> PathBuf {
    dir.path().join(match disk {
        Disk::Written => MEMORY,
        Disk::ReadBack => "read-back",
        Disk::HugePages => "huge-pages",
    })
}

/// Writes a file, removes it from the page cache and reads it again.
fn read_back(dir: &TempDir, disk: Disk) -> io::Result<()> {
    let path = file_name(dir, disk);
    fill(&mut File::create(&path)?)?;
    let mut file = File::open(path)?;
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    let mapping = Mapping::new(Some(&file), PAGES, MAP_PRIVATE)?;
    if mapping.cached() > 0 {
        return Err(io::Error::other("a file did not leave the page cache"));
    }
    if disk == Disk::HugePages {
        mapping.advise(MmapAdvise::MADV_HUGEPAGE)?;
        read(&mapping, 0..PAGES);
    } else {
        io::copy(&mut file, &mut io::sink())?;
    }
    Ok(())
}

/// A new file in `dir` that shares the blocks of the template there.
fn reflink(dir: &TempDir) -> io::Result<File> {
    let file = tempfile::tempfile_in(dir.path())?;
    sys::reflink(&File::open(dir.path().join(MEMORY))?, &file)?;
    Ok(file)
}

/// A template in reserved pages of 2 MiB (`vm.nr_hugepages`).
fn hugetlb(source: &Mapping) -> io::Result<File> {
    // The template, and one clone that copies each page.
    let needed = 2 * PAGES as u64 / 512;
    let free = memory_info("HugePages_Free:")?;
    if free < needed {
        let few = format!("{free} of {needed} huge pages are free");
        return Err(io::Error::other(few));
    }
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_HUGETLB;
    let file = File::from(memfd_create("hugetlb", flags)?);
    file.set_len((PAGES * PAGE) as u64)?;
    Mapping::new(Some(&file), PAGES, MAP_SHARED)?.copy(0, PAGES, source);
    Ok(file)
}

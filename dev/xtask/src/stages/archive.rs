//! The Debian package archive. All access goes through apt, with the host's sources, proxy and keys.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::{host::Unsuitable, progress::Progress, tool};

/// A package that was used in a build.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    /// SHA-256 of the .deb file: computed from the verified download, or copied from the signed package index.
    pub(crate) sha256: String,
}

/// An archive suite that is configured in apt's sources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Suite {
    uri: String,
    release: String,
}

impl Suite {
    /// The sources.list line of this suite.
    pub(crate) fn source_line(&self) -> String {
        const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
        let Self { uri, release } = self;
        format!("deb [signed-by={KEYRING}] {uri} {release} main")
    }

    /// The suite of another release in the same archive.
    pub(crate) fn of(&self, release: &str) -> Self {
        Self {
            uri: self.uri.clone(),
            release: release.to_owned(),
        }
    }

    /// The sources.list line of this suite's source packages.
    pub(crate) fn source_code_line(&self) -> String {
        self.source_line().replacen("deb ", "deb-src ", 1)
    }
}

/// The suites of a Debian release that are configured in apt's sources: the release, its updates and its security
/// updates. Fails if there are none.
pub(crate) fn suites(codename: &str) -> Result<Vec<Suite>> {
    // `--print-uris` also lists indexes that were never fetched; `apt-get indextargets` does not.
    let text = tool::output(Command::new("apt-get").args(["--print-uris", "update"]))?;
    let suites = parse_suites(&text, codename);
    if suites.is_empty() {
        bail!(
            "no suite {codename} in apt's sources: add the Debian archive to /etc/apt/sources.list"
        );
    }
    Ok(suites)
}

fn parse_suites(text: &str, codename: &str) -> Vec<Suite> {
    let known = ["", "-updates", "-security"].map(|ending| format!("{codename}{ending}"));
    let suite = |line: &str| {
        let (index, _) = line.strip_prefix('\'')?.split_once('\'')?;
        let (list, _) = index.split_once("/main/binary-amd64/Packages")?;
        let (uri, release) = list.rsplit_once("/dists/")?;
        let uri = plain_uri(uri).filter(|uri| is_debian(uri))?;
        known.iter().any(|k| k == release).then(|| Suite {
            uri: format!("{uri}/"),
            release: release.to_owned(),
        })
    };
    text.lines().filter_map(suite).collect()
}

/// Whether the URI belongs to Debian's archive or a mirror, judging by its end. Other vendors publish suites with
/// the same names.
fn is_debian(uri: &str) -> bool {
    let ending = uri.rsplit('/').next().unwrap_or_default();
    ["debian", "debian-security"].contains(&ending) || uri.ends_with(".debian.org")
}

/// The HTTP address of a source. A `mirror+file:` source (Debian's cloud images) points to a mirror list on this host.
/// Guests lack that file, so the first mirror in it is used. Returns `None` for media and local directories.
fn plain_uri(uri: &str) -> Option<String> {
    if uri.starts_with("http://") || uri.starts_with("https://") {
        return Some(uri.to_owned());
    }
    let list = fs::read_to_string(uri.strip_prefix("mirror+file:")?).ok()?;
    let first = list
        .split_whitespace()
        .find(|word| word.starts_with("http"))?;
    Some(first.trim_end_matches('/').to_owned())
}

/// Checks that the archive is reachable by fetching one small signed file the way apt does.
///
/// # Errors
/// [`Unsuitable::Archive`] if the fetch fails; `what` names the object to fetch. Also fails if `suites` is empty.
pub(crate) fn check_reachable(suites: &[Suite], what: &str) -> Result<()> {
    let Some(suite) = suites.first() else {
        bail!("no suite of the Debian release in apt's sources");
    };
    let dir = tempfile::tempdir()?;
    let fetched = tool::output(
        Command::new("/usr/lib/apt/apt-helper")
            .args([
                "-o",
                "Acquire::Retries=1",
                "-o",
                "Acquire::http::Timeout=15",
            ])
            .args(["-o", "APT::Sandbox::User=root", "download-file"])
            .arg(format!("{}dists/{}/InRelease", suite.uri, suite.release))
            .arg(dir.path().join("InRelease")),
    );
    fetched.map(drop).map_err(|_| {
        Unsuitable::Archive {
            uri: suite.uri.clone(),
            what: what.to_owned(),
        }
        .into()
    })
}

/// The packages in `wanted` that are not installed.
pub(crate) fn missing(wanted: &[String]) -> Result<Vec<String>> {
    let format = "${db:Status-Status} ${Package}\n";
    let text = tool::output(Command::new("dpkg-query").args(["--show", "--showformat", format]))?;
    let installed: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("installed "))
        .collect();
    let absent = |name: &&String| !installed.contains(name.as_str());
    Ok(wanted.iter().filter(absent).cloned().collect())
}

/// Updates the package lists. A failure only prints a warning: a later download or install fails if it needs a list
/// that could not be updated.
pub(crate) fn update(progress: Progress, log: &Path) -> Result<()> {
    progress.stage("package lists", || {
        if let Err(error) = tool::run(apt("apt-get").arg("update"), log) {
            progress.line(&format!(
                "warning: could not update all package lists: {error:#}"
            ));
        }
        Ok(())
    })
}

pub(crate) fn install(names: &[String], progress: Progress, log: &Path) -> Result<()> {
    progress.line(&format!("installing {}", names.join(" ")));
    progress.stage("host packages", || {
        let mut command = apt("apt-get");
        command.args(["install", "--yes", "--no-install-recommends"]);
        tool::run(command.args(names), log)
    })
}

/// Installs packages from other suites than the host's sources have. `dir` gets the package lists.
pub(crate) fn install_from(
    suites: &[Suite],
    names: &[&str],
    dir: &Path,
    progress: Progress,
    log: &Path,
) -> Result<()> {
    progress.line(&format!("installing {}", names.join(" ")));
    progress.stage("host packages", || {
        let apt = apt_of(suites, dir)?;
        tool::run(apt("apt-get").arg("update"), log)?;
        let release = &suites.last().context("no suite")?.release;
        let mut install = apt("apt-get");
        install.args(["install", "--yes", "--no-install-recommends"]);
        install.args(["--target-release", release]);
        tool::run(install.args(names), log)
    })
}

/// The backports of a Debian release.
pub(crate) fn backports(codename: &str) -> Result<Suite> {
    Ok(suites(codename)?[0].of(&format!("{codename}-backports")))
}

/// Makes commands of apt's programs with sources and package lists of their own in `dir`.
pub(crate) fn apt_of(suites: &[Suite], dir: &Path) -> Result<impl Fn(&str) -> Command> {
    fs::create_dir_all(dir.join("lists/partial"))?;
    let sources = dir.join("sources.list");
    let lines: Vec<_> = suites.iter().map(Suite::source_line).collect();
    fs::write(&sources, lines.join("\n") + "\n")?;
    let options = [
        ("Dir::Etc::sourcelist", sources),
        ("Dir::Etc::sourceparts", PathBuf::from("/dev/null")),
        ("Dir::State::lists", dir.join("lists")),
        ("Dir::Cache::pkgcache", PathBuf::new()),
        ("Dir::Cache::srcpkgcache", PathBuf::new()),
    ];
    let dir = dir.to_owned();
    Ok(move |program: &str| {
        let mut apt = apt(program);
        apt.current_dir(&dir);
        for (option, path) in &options {
            apt.arg("-o").arg(format!("{option}={}", path.display()));
        }
        apt.args(["-o", "APT::Sandbox::User=root"]);
        apt.args(["-o", "Acquire::Languages=none"]);
        apt
    })
}

/// Fetches a file from the archive's pool with this SHA-256, regardless of the host's package lists. Retries,
/// because mirrors respond to some files with 404 for a while.
pub(crate) fn fetch(
    suites: &[Suite],
    path: &str,
    sha256: &str,
    to: &Path,
    log: &Path,
) -> Result<()> {
    const ATTEMPTS: usize = 5;
    let suite = suites.first().context("no suite in apt's sources")?;
    let uri = format!("{}pool/{}", suite.uri, path.replace('+', "%2b"));
    let attempt = || {
        let mut helper = Command::new("/usr/lib/apt/apt-helper");
        helper.args(["-o", "APT::Sandbox::User=root", "download-file", &uri]);
        tool::run(helper.arg(to).arg(format!("SHA256:{sha256}")), log)
    };
    let mut done = attempt();
    for _ in 1..ATTEMPTS {
        if done.is_ok() {
            break;
        }
        done = attempt();
    }
    done.with_context(|| format!("cannot fetch {uri}"))
}

/// apt-get without prompts, for logs.
pub(crate) fn apt(program: &str) -> Command {
    let mut command = Command::new(program);
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-q", "-o", "DPkg::Lock::Timeout=300"])
        .args(["-o", "Acquire::Retries=3"]);
    command
}

/// The candidate version of a package, and its dependencies without version constraints. Of alternative dependencies,
/// only the first is returned. `apt`: [`apt`], or what [`apt_of`] returned.
pub(crate) fn candidate(
    apt: &dyn Fn(&str) -> Command,
    name: &str,
) -> Result<(String, Vec<String>)> {
    let mut command = apt("apt-cache");
    let text = tool::output(command.args(["show", "--no-all-versions", name]))
        .with_context(|| format!("package {name} not found in the archive"))?;
    let version = stanza_field(&text, "Version")
        .with_context(|| format!("`apt-cache show {name}` printed no version"))?;
    let depends = stanza_field(&text, "Depends").unwrap_or_default();
    Ok((version.to_owned(), dependency_names(depends)))
}

/// A package and everything that it depends on, directly or not. Contains every alternative, and no virtual packages.
pub(crate) fn closure(name: &str) -> Result<Vec<String>> {
    let mut command = Command::new("apt-cache");
    command.args(["depends", "--recurse", "--no-recommends", "--no-suggests"]);
    command.args(["--no-conflicts", "--no-breaks", "--no-replaces"]);
    let text = tool::output(command.args(["--no-enhances", name]))
        .with_context(|| format!("package {name} not found in the archive"))?;
    Ok(closure_names(&text))
}

/// The names at the beginnings of lines: indented lines follow those of packages, and virtual packages are in angle
/// brackets.
fn closure_names(depends: &str) -> Vec<String> {
    let is_name = |line: &&str| line.starts_with(|first: char| first.is_ascii_alphanumeric());
    depends.lines().filter(is_name).map(str::to_owned).collect()
}

fn dependency_names(depends: &str) -> Vec<String> {
    depends
        .split(',')
        .filter_map(|one| one.split_whitespace().next())
        .map(str::to_owned)
        .collect()
}

fn stanza_field<'a>(stanza: &'a str, key: &str) -> Option<&'a str> {
    let value = |line: &'a str| line.strip_prefix(key)?.strip_prefix(": ");
    stanza.lines().find_map(value)
}

/// Downloads exactly this version of a package. apt verifies it against the signed package lists.
pub(crate) fn download(
    apt: &dyn Fn(&str) -> Command,
    name: &str,
    version: &str,
    dir: &Path,
    log: &Path,
) -> Result<(Package, PathBuf)> {
    let empty = tempfile::tempdir_in(dir)?;
    tool::run(
        apt("apt-get")
            .current_dir(empty.path())
            .args(["-o", "APT::Sandbox::User=root", "download"])
            .arg(format!("{name}={version}")),
        log,
    )?;
    let file = fs::read_dir(empty.path())?
        .next()
        .with_context(|| format!("`apt-get download {name}` left no file"))??;
    let kept = dir.join(file.file_name());
    fs::rename(file.path(), &kept)?;
    let package = Package {
        name: name.to_owned(),
        version: version.to_owned(),
        sha256: template::file_sum(&kept)?,
    };
    Ok((package, kept))
}

/// Parses the stanzas that `apt-cache show` prints. Duplicates and incomplete stanzas are dropped.
pub(crate) fn parse_packages(text: &str) -> Vec<Package> {
    let package = |stanza: &str| {
        Some(Package {
            name: stanza_field(stanza, "Package")?.to_owned(),
            version: stanza_field(stanza, "Version")?.to_owned(),
            sha256: stanza_field(stanza, "SHA256")?.to_owned(),
        })
    };
    let packages: BTreeSet<_> = text.split("\n\n").filter_map(package).collect();
    packages.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_suites_of_the_release_and_its_updates_are_used() {
        let text = "'http://deb.debian.org/debian/dists/bookworm/InRelease' x 0\n\
                    'http://deb.debian.org/debian/dists/bookworm/main/binary-amd64/Packages.xz' x 0\n\
                    'http://deb.debian.org/debian/dists/bookworm/main/binary-all/Packages.xz' x 0\n\
                    'http://deb.debian.org/debian/dists/bookworm/contrib/binary-amd64/Packages.xz' x 0\n\
                    'https://a.org/debian/12/prod/dists/bookworm/main/binary-amd64/Packages.xz' x 0\n\
                    'https://b.org/dists/nodistro/main/binary-amd64/Packages.xz' x 0\n\
                    'https://c.org/linux/debian/dists/bookworm/stable/binary-amd64/Packages' x 0\n\
                    'http://security.debian.org/dists/bookworm-security/main/binary-amd64/Packages.xz' x\n";
        let suites = parse_suites(text, "bookworm");
        let releases: Vec<_> = suites.iter().map(|s| s.release.as_str()).collect();
        assert_eq!(releases, ["bookworm", "bookworm-security"]);
        assert!(suites[0].source_line().ends_with("/debian/ bookworm main"));
    }

    #[test]
    fn a_mirror_list_resolves_to_its_first_mirror() {
        let mut list = tempfile::Builder::new()
            .prefix("debian")
            .tempfile()
            .unwrap();
        std::io::Write::write_all(
            &mut list,
            b"https://deb.debian.org/debian\thttps://b/debian\n",
        )
        .unwrap();
        let uri = format!("mirror+file:{}", list.path().display());
        assert_eq!(
            plain_uri(&uri).as_deref(),
            Some("https://deb.debian.org/debian")
        );
        assert_eq!(plain_uri("mirror+file:/no/such/list"), None);
        assert_eq!(plain_uri("cdrom:[Debian]"), None);
    }

    #[test]
    fn a_closure_has_no_virtual_packages() {
        let text = "stress-ng\n  Depends: libc6\n |Depends: <debconf-2.0>\nlibc6\n<debconf-2.0>\n  cdebconf\n";
        assert_eq!(closure_names(text), ["stress-ng", "libc6"]);
    }

    #[test]
    fn dependency_names_have_no_versions_or_alternatives() {
        let names = dependency_names("linux-image-x (= 6.1-2), a | b, linux-kbuild-6.1 (>= 6)");
        assert_eq!(names, ["linux-image-x", "a", "linux-kbuild-6.1"]);
        assert!(dependency_names("").is_empty());
    }

    #[test]
    fn duplicate_and_incomplete_stanzas_are_dropped() {
        let stanza = "Package: a\nVersion: 1\nDescription: x\nSHA256: ff\n";
        let text = format!("{stanza}\n{stanza}\nPackage: broken\n");
        let package = Package {
            name: "a".to_owned(),
            version: "1".to_owned(),
            sha256: "ff".to_owned(),
        };
        assert_eq!(parse_packages(&text), [package]);
    }
}

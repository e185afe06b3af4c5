//! The documents as a web site: all pages that README.md leads to, rendered by mdBook, with a search that runs in the
//! browser, a page of everything for the printer, and `llms.txt` with the pages' Markdown for programs.
//!
//! The sections are those of `docs/README.md`. Scripts lie in files of their own, so that a server can forbid all others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Component, Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::{
    markdown::{self, is_fence, numbered},
    stages::stage::{Built, Recipe, Store},
    tool,
    workspace::Workspace,
};

const MDBOOK: &str = "0.5.4";
const PLACE: &str = "docs";
/// The page whose tables are the contents of the site.
const CONTENTS: &str = "docs/README.md";
/// The pages from which all others are reached.
const ROOTS: [&str; 2] = ["README.md", CONTENTS];
const PICTURES: [&str; 2] = ["svg", "png"];

/// Builds the site in target/cube/docs.
pub(crate) fn build(store: &Store, workspace: &Workspace) -> Result<Built> {
    let mdbook = Recipe::new("mdbook").text("version", MDBOOK);
    let mdbook = store.build(&mdbook, "stages/mdbook", |out, log| {
        let mut install = workspace.idle_cargo();
        install
            .args([
                "install",
                "--locked",
                "--no-default-features",
                "--features",
                "search",
            ])
            .args(["--version", MDBOOK, "--root"])
            .arg(out)
            .arg("--target-dir")
            .arg(out.join("target"))
            .arg("mdbook");
        tool::run(&mut install, log)?;
        Ok(fs::remove_dir_all(out.join("target"))?)
    })?;
    let sources = Sources::read(workspace.root())?;
    let mut recipe = Recipe::new("site")
        .text("form", "1")
        .stage("mdbook", &mdbook);
    for (name, page) in &sources.pages {
        recipe = recipe.text(name, page);
    }
    for picture in &sources.pictures {
        recipe = recipe.path(picture, &workspace.root().join(picture))?;
    }
    store.build(&recipe, PLACE, |out, log| {
        let work = out.join("book");
        sources.write(workspace.root(), &work)?;
        let mut render = Command::new(mdbook.dir.join("bin/mdbook"));
        tool::run(render.arg("build").arg(&work), log)?;
        for entry in fs::read_dir(work.join("html"))? {
            let entry = entry?;
            fs::rename(entry.path(), out.join(entry.file_name()))?;
        }
        fs::remove_dir_all(&work)?;
        separate_scripts(out)?;
        check_links(out)
    })
}

/// The files of the site. Names are paths relative to the checkout.
#[derive(Debug)]
struct Sources {
    pages: BTreeMap<String, String>,
    pictures: BTreeSet<String>,
}

impl Sources {
    /// Follows the links from [`ROOTS`].
    fn read(root: &Path) -> Result<Self> {
        let mut sources = Self {
            pages: BTreeMap::new(),
            pictures: BTreeSet::new(),
        };
        let mut queue: Vec<String> = ROOTS.map(str::to_owned).into();
        while let Some(name) = queue.pop() {
            if sources.pages.contains_key(&name) {
                continue;
            }
            let text = fs::read_to_string(root.join(&name));
            let text = text.with_context(|| format!("cannot read {name}"))?;
            for link in markdown::links(&text) {
                let target = resolve(&name, &link.text);
                match Path::new(&target)
                    .extension()
                    .and_then(|ending| ending.to_str())
                {
                    Some("md") => queue.push(target),
                    Some(ending) if PICTURES.contains(&ending) => {
                        sources.pictures.insert(target);
                    }
                    Some(_) | None => {}
                }
            }
            sources.pages.insert(name, text);
        }
        Ok(sources)
    }

    /// Writes mdBook's input.
    fn write(&self, root: &Path, book: &Path) -> Result<()> {
        let src = book.join("src");
        for (name, text) in &self.pages {
            place(
                &src.join(name),
                self.with_links_of_site(name, text).as_bytes(),
            )?;
        }
        for picture in &self.pictures {
            place(&src.join(picture), &fs::read(root.join(picture))?)?;
        }
        place(&src.join("SUMMARY.md"), self.summary().as_bytes())?;
        place(&src.join("llms.txt"), self.overview().as_bytes())?;
        let settings = "[book]\ntitle = \"Cube\"\nlanguage = \"en\"\n\
                        [build]\nbuild-dir = \"html\"\ncreate-missing = false\n\
                        [output.html]\nno-section-label = true\n";
        place(&book.join("book.toml"), settings.as_bytes())
    }

    /// A page with the links of the site: mdBook names a README `index`, and links to files that are not part of the site
    /// become their text.
    fn with_links_of_site(&self, name: &str, text: &str) -> String {
        let mut out = String::new();
        for (_, line, in_block) in numbered(text) {
            let mut rest = line;
            while let Some((before, after)) = rest
                .split_once("](")
                .filter(|_| !in_block && !is_fence(line))
            {
                let (target, after) = after.split_once(')').unwrap_or((after, ""));
                let file = target.split('#').next().unwrap_or_default();
                let known = resolve(name, file);
                let is_alive = file.is_empty()
                    || file.contains("://")
                    || self.pages.contains_key(&known)
                    || self.pictures.contains(&known);
                match before.rsplit_once('[').filter(|_| !is_alive) {
                    Some((before, label)) => out.extend([before, label]),
                    None => {
                        out.extend([before, "](", &target.replace("README.md", "index.md"), ")"])
                    }
                }
                rest = after;
            }
            out.push_str(rest);
            out.push('\n');
        }
        out
    }

    /// The sections of [`CONTENTS`] with their pages, then all other pages.
    fn sections(&self) -> Vec<(String, Vec<&str>)> {
        let mut left: BTreeSet<&str> = self.pages.keys().map(String::as_str).collect();
        for root in ROOTS {
            left.remove(root);
        }
        let mut sections: Vec<(String, Vec<&str>)> = Vec::new();
        for line in self.pages[CONTENTS].lines() {
            if let Some(title) = line
                .strip_prefix("**")
                .and_then(|rest| rest.strip_suffix("**"))
            {
                sections.push((title.to_owned(), Vec::new()));
            }
            let Some((_, pages)) = sections.last_mut() else {
                continue;
            };
            for link in markdown::links(line) {
                if let Some(page) = left.take(resolve(CONTENTS, &link.text).as_str()) {
                    pages.push(page);
                }
            }
        }
        sections.push(("More".to_owned(), left.into_iter().collect()));
        sections
    }

    fn summary(&self) -> String {
        let mut out = "# Summary\n\n[Cube](README.md)\n[All guides](docs/README.md)\n".to_owned();
        for (title, pages) in self.sections() {
            let _ = writeln!(out, "\n# {title}\n");
            for page in pages {
                let _ = writeln!(out, "- [{}]({page})", self.title(page));
            }
        }
        out
    }

    /// `llms.txt`: what there is to read, each page as Markdown.
    fn overview(&self) -> String {
        let mut out = format!("# Cube\n\n> {}\n", self.first_sentence("README.md"));
        for (title, pages) in self.sections() {
            let _ = writeln!(out, "\n## {title}\n");
            for page in pages {
                let _ = writeln!(
                    out,
                    "- [{}]({page}): {}",
                    self.title(page),
                    self.first_sentence(page)
                );
            }
        }
        out
    }

    fn title<'a>(&'a self, page: &'a str) -> &'a str {
        let heading = self.pages[page]
            .lines()
            .find_map(|line| line.strip_prefix("# "));
        heading.unwrap_or(page)
    }

    fn first_sentence(&self, page: &str) -> String {
        let lines = markdown::prose(&self.pages[page]).map(|(_, text)| text.trim());
        let begins = |first: char| first.is_alphanumeric() || "`*".contains(first);
        let lines = lines.skip_while(|text| !text.starts_with(begins));
        let lines: Vec<_> = lines.take_while(|text| !text.is_empty()).collect();
        let text = lines.join(" ");
        let end = text.find(". ").map_or(text.len(), |end| end + 1);
        text[..end].to_owned()
    }
}

/// The path that a link of this page leads to.
fn resolve(page: &str, link: &str) -> String {
    let mut path = PathBuf::from(page);
    path.pop();
    for component in Path::new(link).components() {
        match component {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    path.to_string_lossy().into_owned()
}

fn place(file: &Path, content: &[u8]) -> Result<()> {
    let parent = file
        .parent()
        .context("a file of the site has no directory")?;
    fs::create_dir_all(parent)?;
    fs::write(file, content).with_context(|| format!("cannot write {}", file.display()))
}

/// All HTML files of the site, relative to it.
fn html_files(site: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut dirs = vec![site.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|ending| ending == "html") {
                found.push(path.strip_prefix(site)?.to_string_lossy().into_owned());
            }
        }
    }
    Ok(found)
}

/// Moves the scripts in pages to files that are named by their content.
fn separate_scripts(site: &Path) -> Result<()> {
    const OPEN: &str = "<script>";
    for name in html_files(site)? {
        let page = fs::read_to_string(site.join(&name))?;
        let up = "../".repeat(name.matches('/').count());
        let mut parts = page.split(OPEN);
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (script, after) = part
                .split_once("</script>")
                .context("a script has no end")?;
            let hash = model::hex(&Sha256::digest(script));
            let file = format!("script-{}.js", &hash[..16]);
            fs::write(site.join(&file), script)?;
            let _ = write!(out, "<script src=\"{up}{file}\"></script>{after}");
        }
        fs::write(site.join(&name), out)?;
    }
    Ok(())
}

/// Fails if a link of a page leads to no file of the site, or to no place in it.
fn check_links(site: &Path) -> Result<()> {
    let pages: BTreeMap<String, String> = html_files(site)?
        .into_iter()
        .map(|name| {
            let text = fs::read_to_string(site.join(&name))?;
            Ok((name, text))
        })
        .collect::<Result<_>>()?;
    let mut dead = BTreeSet::new();
    for (name, text) in pages
        .iter()
        .filter(|(name, _)| !["print.html", "404.html"].contains(&name.as_str()))
    {
        for part in text.split("href=\"").skip(1) {
            let link = part.split('"').next().unwrap_or_default();
            if link.is_empty() || link.contains(':') {
                continue;
            }
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() {
                name.clone()
            } else {
                resolve(name, file)
            };
            let is_there = match pages.get(&target) {
                Some(page) => place.is_empty() || page.contains(&format!("id=\"{place}\"")),
                None => site.join(&target).is_file(),
            };
            if !is_there {
                dead.insert(format!("{name}: {link}"));
            }
        }
    }
    let dead: Vec<_> = dead.into_iter().collect();
    ensure!(
        dead.is_empty(),
        "links of the site that lead nowhere:\n{}",
        dead.join("\n")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(pages: &[(&str, &str)]) -> Sources {
        let pages = pages
            .iter()
            .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
        Sources {
            pages: pages.collect(),
            pictures: BTreeSet::new(),
        }
    }

    #[test]
    fn every_page_is_in_one_section() {
        let contents = "# G\n**Use**\n\n| x | [a](use/a.md), [r](../README.md) |\n**Run**\n| y | [a](use/a.md#b) |\n";
        let sources = sources(&[
            (CONTENTS, contents),
            ("README.md", "# C\n\nOne. Two."),
            (
                "docs/use/a.md",
                "# A page\n\n| t |\n\n`x` is first. Second.",
            ),
            ("S.md", "# S"),
        ]);
        let sections = sources.sections();
        let expected = [
            ("Use", vec!["docs/use/a.md"]),
            ("Run", vec![]),
            ("More", vec!["S.md"]),
        ];
        let expected = expected.map(|(title, pages)| (title.to_owned(), pages));
        assert_eq!(sections, expected);
        assert!(sources.summary().contains("- [A page](docs/use/a.md)"));
        assert!(
            sources
                .overview()
                .contains("- [A page](docs/use/a.md): `x` is first.")
        );
    }

    #[test]
    fn links_lead_to_pages_of_the_site_or_become_text() {
        let sources = sources(&[("docs/a.md", ""), ("docs/README.md", ""), ("b.md", "")]);
        let text = "[b](../b.md#x), [c](../c.rs), [r](README.md) [d](https://d) [e](#e)\n```\n[c](c.rs)\n```\n";
        let written = sources.with_links_of_site("docs/a.md", text);
        assert_eq!(
            written,
            text.replacen("[c](../c.rs)", "c", 1)
                .replace("README", "index")
        );
    }

    #[test]
    fn scripts_leave_their_pages_and_dead_links_are_found() {
        let dir = tempfile::tempdir().unwrap();
        place(
            &dir.path().join("u/a.html"),
            b"<script>x</script><a href=\"../b.html#p\">",
        )
        .unwrap();
        place(&dir.path().join("b.html"), b"<i id=\"p\">").unwrap();
        separate_scripts(dir.path()).unwrap();
        let page = fs::read_to_string(dir.path().join("u/a.html")).unwrap();
        assert!(page.starts_with("<script src=\"../script-"), "{page}");
        check_links(dir.path()).unwrap();
        place(&dir.path().join("b.html"), b"").unwrap();
        let why = check_links(dir.path()).unwrap_err().to_string();
        assert!(why.ends_with("u/a.html: ../b.html#p"), "{why}");
    }
}

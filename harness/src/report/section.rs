//! Sections of a report as data. Terminal, Markdown and HTML differ only in how they lay them out.

/// A table with remarks. Either may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// Heads the first column of the table, which has the names of the rows.
    pub title: String,
    /// The columns after the first.
    pub columns: Vec<Column>,
    /// The name of the row, then a cell for each column.
    pub rows: Vec<Vec<String>>,
    /// Sentences below the table.
    pub notes: Vec<String>,
}

/// A column with its title.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Column {
    Number(String),
    Text(String),
    /// One word, such as `met`, whose colour HTML chooses.
    Verdict(String),
    /// A sentence, for which a terminal has no room in the row.
    Remark(String),
}

impl Column {
    #[must_use]
    pub fn title(&self) -> &str {
        match self {
            Self::Number(title)
            | Self::Text(title)
            | Self::Verdict(title)
            | Self::Remark(title) => title,
        }
    }
}

impl Section {
    /// A section without rows.
    #[must_use]
    pub fn remarks(title: &str, notes: Vec<String>) -> Self {
        Self {
            title: title.to_owned(),
            notes,
            ..Self::default()
        }
    }

    /// A table of names and values.
    #[must_use]
    pub fn list(title: &str, values: impl IntoIterator<Item = (String, String)>) -> Self {
        Self {
            title: title.to_owned(),
            columns: vec![Column::Text(String::new())],
            rows: values
                .into_iter()
                .map(|(name, value)| vec![name, value])
                .collect(),
            notes: Vec::new(),
        }
    }

    /// A table of numbers.
    #[must_use]
    pub fn numbers<const N: usize>(
        title: &str,
        columns: [&str; N],
        rows: Vec<Vec<String>>,
    ) -> Self {
        Self {
            title: title.to_owned(),
            columns: columns.map(|title| Column::Number(title.to_owned())).into(),
            rows,
            notes: Vec::new(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.notes.is_empty()
    }

    /// Whether a column has a title: if none has, the title is that of the section alone.
    #[must_use]
    pub fn has_header(&self) -> bool {
        self.columns.iter().any(|column| !column.title().is_empty())
    }
}

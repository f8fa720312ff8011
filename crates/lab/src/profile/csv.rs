//! The table inside what `ncu --csv` prints: quoted fields, with lines of the profiler and of the program around it.

use crate::Error;

/// The last column that every row of the details page has.
const VALUE: &str = "Metric Value";

/// A table, read by header name and never by position: columns differ between versions of the profiler.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Table {
    pub(super) header: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn column(&self, name: &str) -> Option<usize> {
        self.header.iter().position(|field| field == name)
    }

    /// A cell; empty when there is no such column.
    pub(super) fn cell<'a>(&self, row: &'a [String], name: &str) -> &'a str {
        self.column(name).and_then(|column| row.get(column)).map_or("", String::as_str)
    }
}

/// Reads the table. `source` names the text in errors.
pub(super) fn read(text: &str, source: &str) -> Result<Table, Error> {
    let bad = |why: String| Error::Capture { source_name: source.to_owned(), why };
    let Some(start) = header_start(text) else {
        let said: Vec<&str> = text.lines().filter(|line| line.contains("==ERROR==")).take(3).collect();
        let said = if said.is_empty() { String::new() } else { format!("; it says: {}", said.join(" ")) };
        return Err(bad(format!("there is no table in it (a header that begins with \"ID\"){said}")));
    };
    let first_line = text[..start].lines().count() + 1;
    let mut records = Records { rest: &text[start..], line: first_line };
    let header = match records.next() {
        Some(Ok(record)) => record.fields,
        _ => return Err(bad("its header is cut short".to_owned())),
    };
    // The details page leaves the columns of rules off a metric's row, all but one; everything up to the value is there.
    let fewest = header.iter().position(|name| name == VALUE).map_or(header.len(), |value| value + 1);
    let mut rows = Vec::new();
    for record in records {
        let Record { fields, line } =
            record.map_err(|line| bad(format!("it is cut short: the quote on line {line} does not end")))?;
        if fields.len() > header.len() || fields.len() < fewest {
            return Err(bad(format!(
                "line {line} has {} fields and the header {}: it is cut short or not a table of ncu",
                fields.len(),
                header.len()
            )));
        }
        rows.push(fields);
    }
    Ok(Table { header, rows })
}

/// Where the header line begins.
fn header_start(text: &str) -> Option<usize> {
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let plain = line.trim_start_matches('\u{feff}');
        if plain.starts_with("\"ID\",") || plain.starts_with("ID,") {
            return Some(at + line.len() - plain.len());
        }
        at += line.len();
    }
    None
}

struct Record {
    fields: Vec<String>,
    line: usize,
}

// Not the crate `csv`: it takes a quote that never ends for the end of the file, and a capture that was cut short must be
// refused; and the profiler's own lines stand between records.
/// Records of RFC 4180, without the profiler's own lines between them. An error is the line of a quote that never ends.
struct Records<'a> {
    rest: &'a str,
    line: usize,
}

impl Iterator for Records<'_> {
    type Item = Result<Record, usize>;

    fn next(&mut self) -> Option<Self::Item> {
        // Lines such as `==PROF== Disconnected`, and empty ones.
        loop {
            let line = self.rest.split_inclusive('\n').next()?;
            if !(line.trim().is_empty() || line.starts_with("==")) {
                break;
            }
            self.rest = &self.rest[line.len()..];
            self.line += 1;
        }
        let first_line = self.line;
        let mut fields = vec![String::new()];
        let mut quoted = false;
        let mut characters = self.rest.char_indices().peekable();
        let mut end = self.rest.len();
        while let Some((at, c)) = characters.next() {
            // There is always a last field: the vector starts with one and only grows.
            let last = fields.len() - 1;
            match c {
                '"' if quoted && characters.peek().is_some_and(|(_, next)| *next == '"') => {
                    characters.next();
                    fields[last].push('"');
                }
                '"' => quoted = !quoted,
                ',' if !quoted => fields.push(String::new()),
                '\n' if !quoted => {
                    end = at + 1;
                    self.line += 1;
                    break;
                }
                '\r' if !quoted => {}
                '\n' => {
                    self.line += 1;
                    fields[last].push(c);
                }
                other => fields[last].push(other),
            }
        }
        self.rest = &self.rest[end..];
        if quoted {
            self.rest = "";
            return Some(Err(first_line));
        }
        Some(Ok(Record { fields, line: first_line }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_quotes_and_line_breaks_are_handled() {
        let text = "==PROF== Connected to process 1\nprogram says hello, \"ID\" or not\n\
                    \"ID\",\"Kernel Name\",\"x\"\r\n==PROF== noise\n\"0\",\"f(int, \"\"a\"\")\",\"1,234\"\n\
                    1,plain,\"two\nlines\"\n\n==PROF== Disconnected\n";
        let table = read(text, "test").unwrap();
        assert_eq!(table.header, ["ID", "Kernel Name", "x"]);
        assert_eq!(table.rows.len(), 2);
        assert_eq!(table.cell(&table.rows[0], "Kernel Name"), "f(int, \"a\")");
        assert_eq!(table.cell(&table.rows[0], "x"), "1,234");
        assert_eq!(table.cell(&table.rows[1], "x"), "two\nlines");
        assert_eq!(table.cell(&table.rows[1], "y"), "");
    }

    #[test]
    fn what_is_cut_short_or_no_table_is_named() {
        let message = |text: &str| read(text, "prof.csv").unwrap_err().to_string();
        assert!(
            message("\"ID\",\"a\"\n\"0\",\"1").contains("line 2"),
            "{}",
            message("\"ID\",\"a\"\n\"0\",\"1")
        );
        assert!(message("\"ID\",\"a\"\n\"0\"\n").contains("1 fields and the header 2"));
        let refused = message("==ERROR== ERR_NVGPUCTRPERM - no permission\n");
        assert!(refused.contains("prof.csv") && refused.contains("ERR_NVGPUCTRPERM"), "{refused}");
        assert!(message("").contains("no table"));
    }
}

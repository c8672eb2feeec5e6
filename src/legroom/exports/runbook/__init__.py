"""The troubleshooting tree from the catalog: Markdown with Mermaid, and a picture."""

"""Reports as one HTML file each: no script, no other file, every text of a port escaped.

`templates/` holds the pages and the style; the modules beside it turn records into what the templates show.
"""

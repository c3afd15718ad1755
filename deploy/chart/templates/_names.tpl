{{- define "gpuckpt.image" -}}
{{- with .Values.image -}}
"{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}"
{{- end -}}
{{- end -}}

{{- /* Labels of an object: of a list of the context and the program's name. */ -}}
{{- define "gpuckpt.labels" -}}
app.kubernetes.io/name: {{ index . 1 }}
app.kubernetes.io/part-of: gpuckpt
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
{{- end -}}
